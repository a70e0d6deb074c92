"""Removing what killed programs left behind.

In: nothing. Out: what was removed. Every launcher does this when it starts and when it ends; `claw reap` does it by
hand. The leases themselves are read and judged in `host/leases.py`.
"""

from pathlib import Path

from claw_envs.errors import SandboxError
from claw_envs.sandbox.host import leases
from claw_envs.sandbox.host.leases import Reaped

__all__ = ["Reaped", "reap"]


def reap(state: Path | None = None) -> Reaped:
    """Kills and removes the sandboxes whose owner or launcher is dead or whose lease is over.

    Args:
        state: the folder of leases; None takes this user's own.

    Raises:
        SandboxError: the folder of leases is not a private folder of this user.
    """
    folder = state or leases.default_state()
    if not folder.exists():
        return Reaped((), 0, ())
    try:
        return leases.reap(leases.open_state(folder))
    except PermissionError as error:
        raise SandboxError(str(error)) from error
