"""What a finished run says of itself: summary.json, curve.png, replies.md.

In: held-out scores before and after, the base weights' second try, the metrics. Out: differences with bootstrap
intervals over tasks. States what was measured and nothing else; a result that contradicts the hope is written the same
way.
"""

import asyncio
import io
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from claw_train.codec import dump, load
from claw_train.config import TrainConfig
from claw_train.hosting.evaluate import Evaluation, Scores, TaskScore
from claw_train.ledger import LedgerCounts
from claw_train.run_folder import RunFolder, disk_errors, git_commit, processor, write_bytes, write_text
from claw_train.types import Version

_RESAMPLES = 2000
_MEMORY_EVERY_S = 2.0


class Report:
    """Gathers a run's figures and writes them at the end."""

    def __init__(self, folder: RunFolder, config: TrainConfig) -> None:
        self._folder = folder
        self._config = config
        self._peak_memory = 0
        self.training_s = 0.0
        """Wall time of this process's training, evaluations before and after not included."""
        self._summary: dict[str, Any] = {}

    def _file(self, label: str) -> Path:
        return self._folder.path / "eval" / f"{label}.json"

    def stored(self, label: str, version: Version) -> Evaluation | None:
        """An evaluation of `version` that an earlier process of this run finished; None when there is none."""
        file = self._file(label)
        found = load(Evaluation, file.read_bytes()) if file.is_file() else None
        return found if found is not None and found.is_of(version) else None

    def store(self, evaluation: Evaluation) -> None:
        """Keeps an evaluation for a later process.

        Raises:
            DiskError: it cannot be written.
        """
        file = self._file(evaluation.label)
        with disk_errors(file):
            file.parent.mkdir(mode=0o700, exist_ok=True)
        write_bytes(file, dump(evaluation))

    async def watch_memory(self) -> None:
        """Follows the summed resident memory of this process and all its descendants until cancelled."""
        import psutil

        while True:
            total = 0
            for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
                try:
                    total += process.memory_info().rss
                except psutil.Error:  # it has just ended
                    continue
            self._peak_memory = max(self._peak_memory, total)
            await asyncio.sleep(_MEMORY_EVERY_S)

    def finish(
        self,
        *,
        before: Evaluation,
        after: Evaluation,
        again: Evaluation,
        counts: LedgerCounts,
        swaps: Sequence[float],
        history: Sequence[Mapping[str, float]],
    ) -> None:
        """Writes summary.json, curve.png and replies.md.

        Raises:
            DiskError: one of them cannot be written.
        """
        config = self._config
        steps = [row for row in history if "reward" in row]
        self._summary = {
            "model": config.model.name,
            "streams": [s.name for s in config.streams],
            "seed": config.seed,
            "reward": config.reward,
            "method": config.method.name,
            "steps": config.trainer.steps,
            "heldout_tasks": compare(before.tasks, after.tasks),
            "heldout_families": compare(before.families, after.families),
            "base_arm": compare(before.tasks, again.tasks),
            "training_minutes": _round(self.training_s / 60),
            "peak_memory_gib": _round(self._peak_memory / 2**30),
            "swap_seconds_max": _round(max(swaps, default=0.0)),
            "staleness_max": max((row.get("staleness_max", 0.0) for row in steps), default=0.0),
            "ledger": asdict(counts),
            "commit": git_commit(),
            "processor": processor(),
        }
        write_text(self._folder.summary, json.dumps(self._summary, indent=2, allow_nan=False) + "\n")
        write_text(self._folder.path / "replies.md", replies_text(before.tasks, after.tasks))
        title = f"{config.model.name}, seed {config.seed}" + (
            ", shuffled reward" if config.reward == "shuffled" else ""
        )
        draw_curve(self._folder.path / "curve.png", history, title=title)

    def lines(self) -> list[str]:
        """The summary in a few lines, for people."""
        tasks, families = self._summary["heldout_tasks"], self._summary["heldout_families"]
        low, high = tasks["interval_95"] or (None, None)
        return [
            f"held-out tasks     {_change(tasks)}  (difference {_shown(tasks['difference'], '+.2f')}, "
            f"95% interval {_shown(low, '+.2f')} to {_shown(high, '+.2f')}; {tasks['tasks']} tasks)",
            f"  among parsable   {_change(tasks['among_parsable'])}  (their share {_change(tasks['parse_share'])})",
            f"held-out families  {_change(families)}",
            f"base weights again {_shown(self._summary['base_arm']['after'])}",
            f"summary, curve and replies: {self._folder.path}",
        ]


def _shown(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _change(row: Mapping[str, Any]) -> str:
    return f"{_shown(row['before'])} -> {_shown(row['after'])}"


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> tuple[float, float] | None:
    """Percentile bootstrap interval of the mean; None of nothing."""
    if not values:
        return None
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    tail = (1 - level) / 2
    return means[int(tail * _RESAMPLES)], means[min(_RESAMPLES - 1, int((1 - tail) * _RESAMPLES))]


def paired(before: Scores, after: Scores) -> list[tuple[TaskScore, TaskScore]]:
    """Tasks that both evaluations could grade, matched by position; the same tasks are played each time."""
    rows = zip(before.rows, after.rows, strict=True)
    return [(b, a) for b, a in rows if b.outcome is not None and a.outcome is not None]


def compare(before: Scores, after: Scores) -> dict[str, Any]:
    """Means before and after, the paired difference with its interval, and the same among parsable replies.

    All of them over the tasks that both evaluations could grade; None where there is nothing to take a mean of.
    """
    pairs = paired(before, after)
    sides = {"before": [b for b, _ in pairs], "after": [a for _, a in pairs]}
    differences = [(a.outcome or 0.0) - (b.outcome or 0.0) for b, a in pairs]
    interval = bootstrap_interval(differences)
    return {
        "tasks": len(pairs),
        "ungraded": len(before.rows) - len(pairs),
        **{side: _mean([row.outcome or 0.0 for row in rows]) for side, rows in sides.items()},
        "difference": _mean(differences),
        "interval_95": None if interval is None else [_round(bound) for bound in interval],
        "parse_share": {side: _mean([float(row.parsable) for row in rows]) for side, rows in sides.items()},
        "among_parsable": {
            side: _mean([row.outcome or 0.0 for row in rows if row.parsable]) for side, rows in sides.items()
        },
        "by_family": {name: [_round(b), _round(a)] for name, (b, a) in _by_family(pairs).items()},
    }


def _mean(values: Sequence[float]) -> float | None:
    return _round(statistics.fmean(values)) if values else None


def _by_family(pairs: Sequence[tuple[TaskScore, TaskScore]]) -> dict[str, tuple[float, float]]:
    families: dict[str, list[tuple[float, float]]] = {}
    for b, a in pairs:
        families.setdefault(b.task_id.split("/")[0], []).append((b.outcome or 0.0, a.outcome or 0.0))
    return {
        name: (statistics.fmean(r[0] for r in rows), statistics.fmean(r[1] for r in rows))
        for name, rows in sorted(families.items())
    }


def _round(value: float) -> float:
    return round(value, 4)


def replies_text(before: Scores, after: Scores, *, most: int = 12) -> str:
    """What the model said to the same tasks before and after, as Markdown."""
    lines = ["# Replies before and after", ""]
    for b, a in paired(before, after)[:most]:
        lines += [f"## {b.task_id}", "", b.instruction, ""]
        for name, row in (("before", b), ("after", a)):
            lines.append(f"**{name}** (outcome {row.outcome:.2g})")
            for reply in row.replies:
                lines += ["", *("    " + line for line in reply.splitlines() or [""])]
            lines.append("")
    return "\n".join(lines) + "\n"


def draw_curve(path: Path, history: Sequence[Mapping[str, float]], *, title: str) -> None:
    """curve.png: training reward a step, held-out score where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120)
    rows = [r for r in history if "reward" in r]
    axes.plot([r["step"] for r in rows], [r["reward"] for r in rows], label="training reward", color="#8aa6c1")
    for key, label, color in (
        ("heldout", "held-out tasks", "#c0392b"),
        ("heldout_families", "held-out families", "#7d6608"),
    ):
        points = [r for r in history if key in r]
        axes.plot([r["step"] for r in points], [r[key] for r in points], "o-", label=label, color=color)
    axes.set(xlabel="optimizer step", ylabel="share of tasks solved", ylim=(-0.02, 1.02), title=title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    pyplot.close(figure)
    write_bytes(path, picture.getvalue())
