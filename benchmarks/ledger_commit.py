"""How long a captured reply waits for its commit, and how many turns a second the ledger takes.

    python benchmarks/ledger_commit.py [--folder DIR] [--captures 2000]

Each caller captures one turn after another (prompt 512 tokens shared with its group, reply 64 tokens) as a gateway
does: the next begins when the last is on disk. Prints and appends one row to `benchmarks/results/ledger_commit.jsonl`.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from claw_train.ledger import GroupRecord, Ledger
from claw_train.run_folder import git_commit, processor
from claw_train.types import Completion, Sampling, Turn, TurnId, TurnKind, TurnStatus, Version

RESULTS = Path(__file__).parent / "results" / "ledger_commit.jsonl"
PROMPT = tuple(range(1000, 1512))
VERSION = Version("main", 0, 0)
SAMPLING = Sampling(seed=0)


def make_turn(session: str, seed: int) -> Turn:
    """A turn of realistic size."""
    completion = Completion(
        token_ids=tuple(1 + (seed * 31 + i) % 49000 for i in range(64)),
        logprobs=tuple(-0.01 * i for i in range(64)),
        versions=(VERSION,) * 64,
        finish_reason="stop",
        sampling=SAMPLING,
        text="ls -la /work && cat notes.txt",
    )
    return Turn(
        id=TurnId("bench", session, 0),
        policy="main",
        kind=TurnKind.MAIN,
        prompt_ids=PROMPT,
        completion=completion,
        status=TurnStatus.OK,
        group_id="g",
        task_id="t",
    )


async def measure(folder: Path, *, callers: int, captures: int) -> dict[str, float]:
    """Latency in milliseconds and captures a second with `callers` at once."""
    waits: list[float] = []
    async with Ledger.open(folder, create=True) as ledger:
        await ledger.add_group(GroupRecord(id="g", stream="bench", index=0, seed=0, size=captures))

        async def call(caller: int) -> None:
            for i in range(captures // callers):
                turn = make_turn(f"s{caller}-{i}", caller * captures + i)
                started = time.perf_counter()
                await ledger.capture(turn)
                waits.append((time.perf_counter() - started) * 1000)

        commits, started = ledger.commits, time.perf_counter()
        await asyncio.gather(*(call(c) for c in range(callers)))
        seconds = time.perf_counter() - started
        await ledger.audit()
        quantiles = statistics.quantiles(waits, n=100)
        return {
            "callers": callers,
            "captures": len(waits),
            "p50_ms": round(quantiles[49], 3),
            "p99_ms": round(quantiles[98], 3),
            "max_ms": round(max(waits), 3),
            "captures_per_s": round(len(waits) / seconds, 1),
            "captures_per_commit": round(len(waits) / (ledger.commits - commits), 2),
        }


def fsync_ms(folder: Path, n: int = 200) -> float:
    """Median milliseconds of writing and syncing 8 kB here: what the disk alone costs."""
    waits: list[float] = []
    with (folder / "probe").open("wb", buffering=0) as file:
        for _ in range(n):
            started = time.perf_counter()
            file.write(b"x" * 8192)
            os.fsync(file.fileno())
            waits.append((time.perf_counter() - started) * 1000)
    return round(statistics.median(waits), 3)


def main() -> None:
    """Measures one and 32 callers and appends a row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--captures", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        row = {
            "command": " ".join(["python", *sys.argv]),
            "commit": git_commit(),
            "hardware": processor(),
            "load_average": os.getloadavg()[0],
            "fsync_p50_ms": fsync_ms(folder),
            "rows": [
                asyncio.run(measure(folder / f"run{callers}", callers=callers, captures=arguments.captures))
                for callers in (1, 32)
            ],
        }
    line = json.dumps(row)
    print(line)
    with RESULTS.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    main()
