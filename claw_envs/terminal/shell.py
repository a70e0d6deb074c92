"""What the environment itself does in a fresh sandbox: lay out a task's files. Knows no grading and no policy."""

import shlex

from claw_envs.errors import SandboxError
from claw_envs.sandbox.base import WORKDIR, Sandbox
from claw_envs.types import Task

_TIMEOUT_S = 10.0


def prepare(sandbox: Sandbox, task: Task) -> None:
    """Writes the start state into the working folder.

    Raises:
        SandboxError: the sandbox is gone, or the files could not be made.
    """
    commands: list[str] = []
    for path, text in task.files.items():
        where = f"{WORKDIR}/{path}"
        if path.endswith("/"):
            commands.append(f"mkdir -p -m {task.modes.get(path, 0o755):o} {shlex.quote(where)}")
        else:
            sandbox.write(where, text.encode(), mode=task.modes.get(path, 0o644))
    if commands:
        result = sandbox.exec(" && ".join(commands), timeout_s=_TIMEOUT_S)
        if result.exit_code != 0:
            raise SandboxError(f"start folders of {task.id} were not made: {result.stderr[-200:]!r}")
