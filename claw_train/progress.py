"""What a person sees while a run goes on: a live panel on a terminal, plain lines elsewhere.

In: phases, steps and notes. Out: text on standard output. Decides nothing.
"""

import contextlib
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """One finished step, for people."""

    step: int
    steps: int
    reward: float
    """Share of training episodes that succeeded."""
    heldout: float | None
    """Latest held-out score; None before the first."""
    tokens_per_s: float
    """Sampled tokens of training episodes, on average since training began; evaluations are not counted."""
    staleness: float
    """Mean age of trained tokens, in versions."""
    queues: Mapping[str, int]
    elapsed_s: float
    left_s: float


class Progress(Protocol):
    """A way of showing progress."""

    def phase(self, text: str) -> None:
        """A new part of the run begins."""
        ...

    def step(self, view: StepView) -> None:
        """A step is done."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line."""
        ...

    def close(self) -> None:
        """Leaves the screen tidy."""
        ...


def open_progress() -> Progress:
    """A live panel when standard output is a terminal, plain lines otherwise."""
    return LivePanel() if sys.stdout is not None and sys.stdout.isatty() else PlainLines()


def clock(seconds: float) -> str:
    """`mm:ss`, or `h:mm:ss` from an hour on."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m:02d}:{s:02d}"


def describe(view: StepView) -> str:
    """One line of plain text."""
    heldout = "-" if view.heldout is None else f"{view.heldout:.2f}"
    queues = " ".join(f"{k} {v}" for k, v in view.queues.items())
    return (
        f"step {view.step}/{view.steps}  reward {view.reward:.2f}  held-out {heldout}  "
        f"{view.tokens_per_s:.0f} tok/s  staleness {view.staleness:.1f}  [{queues}]  "
        f"{clock(view.elapsed_s)}, {clock(view.left_s)} left"
    )


class PlainLines:
    """A line an event, flushed at once."""

    def phase(self, text: str) -> None:
        """Prints it."""
        self._line(text)

    def step(self, view: StepView) -> None:
        """Prints one line."""
        self._line(describe(view))

    def note(self, text: str) -> None:
        """Prints it."""
        self._line(text)

    def close(self) -> None:
        """Nothing to tidy."""

    @staticmethod
    def _line(text: str) -> None:
        # a reader that is gone, a closed or full standard output: no reason to end a run
        with contextlib.suppress(OSError, ValueError, AttributeError):
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()


@dataclass(slots=True)
class LivePanel:
    """A panel that is redrawn in place."""

    _phase: str = "starting"
    _since: float = field(default_factory=time.monotonic)
    _views: list[StepView] = field(default_factory=list[StepView])
    _live: Any = None

    def __post_init__(self) -> None:
        from rich.live import Live

        self._live = Live(self, refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def phase(self, text: str) -> None:
        """Shows it in the title."""
        self._phase, self._since = text, time.monotonic()
        self._live.refresh()

    def step(self, view: StepView) -> None:
        """Redraws with the new figures."""
        self._views.append(view)
        self._live.refresh()

    def note(self, text: str) -> None:
        """Prints above the panel."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._live.stop()

    def __rich__(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table

        table = Table.grid(padding=(0, 2))
        if self._views:
            view = self._views[-1]
            table.add_row("step", f"{view.step}/{view.steps}")
            table.add_row("reward", f"{view.reward:.2f}  {sparkline([v.reward for v in self._views])}")
            table.add_row("held-out", "-" if view.heldout is None else f"{view.heldout:.2f}")
            table.add_row("speed", f"{view.tokens_per_s:.0f} tokens/s")
            table.add_row("staleness", f"{view.staleness:.1f} versions")
            table.add_row("queues", "  ".join(f"{k} {v}" for k, v in view.queues.items()))
            table.add_row("time", f"{clock(view.elapsed_s)}, about {clock(view.left_s)} left")
        else:
            table.add_row("waiting", clock(time.monotonic() - self._since))
        return Panel(table, title=f"claw-train: {self._phase}", expand=False)


def sparkline(values: list[float], *, width: int = 40) -> str:
    """Values in [0, 1] as a row of blocks, the newest `width` of them."""
    return "".join(_SPARKS[min(len(_SPARKS) - 1, max(0, int(v * len(_SPARKS))))] for v in values[-width:])
