"""Everything the environments raise on purpose.

    ClawEnvError
    |-- SandboxError            the world failed, not the agent
    |   |-- SandboxLost         (ConnectionError)  the sandbox died or vanished
    |   |-- SandboxTimeout      (TimeoutError)     the sandbox itself did not answer in time
    |   `-- SandboxUnavailable  (OSError)          this machine cannot run the backend; says what is missing
    |-- TaskError               (ValueError)       a task, split or option that does not exist
    `-- GraderError             (RuntimeError)     grading broke; the outcome is invalid, never 0

Each error also inherits the standard kind in brackets, so callers may catch either. A bad command, a wrong
answer or a command's own timeout is data (`ExecResult`), not an error.
"""


class ClawEnvError(Exception):
    """Base of all errors raised by claw_envs."""


class SandboxError(ClawEnvError):
    """The world failed; nothing may be concluded about the agent."""


class SandboxLost(SandboxError, ConnectionError):
    """The sandbox died or vanished under us."""


class SandboxTimeout(SandboxError, TimeoutError):
    """The sandbox did not answer within its own deadline."""


class SandboxUnavailable(SandboxError, OSError):
    """The backend cannot run on this machine; the message names what is missing and how to get it."""


class TaskError(ClawEnvError, ValueError):
    """An unknown task, split, family or option."""


class GraderError(ClawEnvError, RuntimeError):
    """Grading itself broke."""
