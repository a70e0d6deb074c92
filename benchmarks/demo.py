"""The demo over several seeds and its negative control: does a small model learn, and only from the true reward?

    python -m benchmarks.demo                     # seeds 0 1 2, then shuffled reward with seed 0
    python -m benchmarks.demo --runs runs/demo    # collects finished runs only, trains nothing that is there

One run after another, each a whole `claw-train experiment=demo`; writes `results/demo.json` (every run's summary and
what they show together) and copies the first run's curve and replies beside it. A result that contradicts the hope is
written the same way.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
RUN_TIMEOUT_S = 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, then collects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--control-seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/demo"), help="folder of the runs")
    parser.add_argument("overrides", nargs="*", help="further configuration of every run")
    args = parser.parse_intermixed_args(argv)
    arms = [(seed, "verified") for seed in args.seeds] + [(seed, "shuffled") for seed in args.control_seeds]
    for seed, reward in arms:
        folder = args.runs / f"{reward}-{seed}"
        if not (folder / "summary.json").is_file():
            train(folder, seed, reward, args.overrides)
    rows = [json.loads((args.runs / f"{reward}-{seed}" / "summary.json").read_text()) for seed, reward in arms]
    RESULTS.mkdir(exist_ok=True)
    command = " ".join(["python -m benchmarks.demo", *args.overrides])
    (RESULTS / "demo.json").write_text(json.dumps({"command": command, **verdict(rows), "runs": rows}, indent=2) + "\n")
    first = args.runs / f"{arms[0][1]}-{arms[0][0]}"
    for name in ("curve.png", "replies.md"):
        shutil.copyfile(first / name, RESULTS / f"demo-{name}")
    print(table(rows))
    return 0


def train(folder: Path, seed: int, reward: str, overrides: Sequence[str]) -> None:
    """One run, new or continued."""
    resume = (folder / "config.yaml").is_file()
    words = (
        [f"resume={folder}"] if resume else ["experiment=demo", f"seed={seed}", f"reward={reward}", f"run_dir={folder}"]
    )
    command = [sys.executable, "-m", "claw_train", *words, *([] if resume else overrides)]
    print(" ".join(command[1:]), flush=True)
    subprocess.run(command, check=True, timeout=RUN_TIMEOUT_S)


def verdict(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the runs show together, against the bars set before they were made."""
    verified = [row["heldout_tasks"] for row in rows if row["reward"] == "verified"]
    control = [row["heldout_tasks"] for row in rows if row["reward"] == "shuffled"]
    gains = [row["difference"] for row in verified]
    parsable = [row["among_parsable"]["after"] - row["among_parsable"]["before"] for row in verified]
    return {
        "gain_of_each_seed": gains,
        "gain_at_least_0.20_in_each": all(gain >= 0.20 for gain in gains),
        "gain_among_parsable_of_each_seed": [round(gain, 4) for gain in parsable],
        "gain_among_parsable_at_least_0.10_in_each": all(gain >= 0.10 for gain in parsable),
        "interval_excludes_0_in_each": all(row["interval_95"][0] > 0 for row in verified),
        "control_gain": [row["difference"] for row in control],
        "control_intervals": [row["interval_95"] for row in control],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row a run."""
    lines = [
        "| reward | seed | held-out before | after | difference (95% interval) | parsable: before | after "
        "| unseen families | training | peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tasks, families = row["heldout_tasks"], row["heldout_families"]
        low, high = tasks["interval_95"]
        lines.append(
            f"| {row['reward']} | {row['seed']} | {tasks['before']:.2f} | {tasks['after']:.2f} "
            f"| {tasks['difference']:+.2f} ({low:+.2f} to {high:+.2f}) "
            f"| {tasks['among_parsable']['before']:.2f} | {tasks['among_parsable']['after']:.2f} "
            f"| {families['before']:.2f} -> {families['after']:.2f} "
            f"| {row['training_minutes']:.1f} min | {row['peak_memory_gib']:.1f} GiB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
