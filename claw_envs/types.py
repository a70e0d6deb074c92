"""The values that cross the border of an environment.

In: a `Task` (what to do, how it is graded). Out: a `NextState` (what the world answered) and, at the end,
a `Verdict`. These types know nothing of policies, tokens, judges or training, and hold no policy output.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    """Who speaks in a next state."""

    USER = "user"
    TOOL = "tool"
    TERMINAL = "terminal"
    SCREEN = "screen"
    TEST = "test"


class FailureKind(StrEnum):
    """Why an episode has no valid outcome. Never a judgement of the policy."""

    SANDBOX_LOST = "sandbox_lost"
    RESET_FAILED = "reset_failed"
    GRADER_BROKE = "grader_broke"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One exercise: an instruction, the start state and what counts as done.

    Example: `Task(id="count_lines/train/17/l1", family="count_lines", split="train", seed=17, level=1,
    instruction="How many lines ...", payload={...})`.
    """

    id: str
    """Unique and stable: the same id always names the same exercise."""
    family: str
    split: str
    """`train`, `eval` (same families, unseen names, contents and wordings) or `heldout` (unseen families)."""
    seed: int
    level: int
    """1 (one command suffices) upwards."""
    instruction: str
    """What the agent is told."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Start state: path relative to the working folder -> text. A path that ends in `/` is a folder."""
    modes: Mapping[str, int] = field(default_factory=dict[str, int])
    """Permission bits of start files that differ from 0o644 (files) or 0o755 (folders)."""
    oracle: tuple[str, ...] = ()
    """Commands that solve the task; never shown to the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What one command did inside a sandbox."""

    stdout: bytes
    """Head and tail of the stream where it was longer than the cap; raw bytes."""
    stderr: bytes
    exit_code: int | None
    """None when the command was killed at its deadline."""
    timed_out: bool = False
    oom: bool = False
    """True when the kernel killed a process of this command for memory."""
    bytes_total: int = 0
    """Bytes written to both streams, including those left out of `stdout` and `stderr`."""
    shell_restarted: bool = False
    """True when the command ended the shell itself; a new one runs, variables and folder are lost."""
    cwd: str = ""
    """The shell's folder after the command; "" when unknown (it ended, or no shell ran it)."""
    stdout_omitted: int = 0
    """Bytes left out of the middle of `stdout`, at half of the cap (`Limits.output_bytes // 2`)."""
    stderr_omitted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextState:
    """What followed one action. Domains derive from this and add their own fields."""

    role: Role
    text: str
    """Rendered for a language model, bounded in length, valid Unicode."""
    valid: bool = True
    """False when the world itself failed; nothing may be learned from such a state."""
    failure_kind: FailureKind | None = None
    """Why `valid` is False; None when it is True."""
    command: bool = True
    """False when the reply held no action that the environment could carry out."""
    is_error: bool = False
    """True when the world refused the action: a failed command, a tool error, an unparseable call."""
    newly_passed: tuple[str, ...] | None = None
    """Task checks that pass now and did not before the action; None when checks run only at the end."""

    def __post_init__(self) -> None:
        if self.valid != (self.failure_kind is None):
            raise ValueError(f"valid={self.valid} does not go with failure_kind={self.failure_kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalState(NextState):
    """The answer of a shell to one command."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    """None when no command ran or it was killed at its deadline."""
    timed_out: bool = False
    oom: bool = False
    bytes_total: int = 0
    cwd: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The grade of a finished episode, made where the agent cannot reach."""

    value: float
    """In [0, 1]; 0.0 and meaningless when `valid` is False."""
    valid: bool = True
    """False when the grader itself broke."""
    checks: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Check name -> passed."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.value <= 1.0:
            raise ValueError(f"a verdict lies in [0, 1], got {self.value}")
