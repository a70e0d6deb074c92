"""A sandbox that is none: commands run on this machine, as the caller, in a folder of their own.

For looking at an environment where no isolated backend runs. It must be asked for with `unsafe=True` and reports
`isolated=False`. `/work` is not a real path here: `write`, `read` and the shell's start folder map it to the private
folder, a command that names `/work` does not find it.
"""

from claw_envs.sandbox.base import Limits
from claw_envs.sandbox.hosted import HostedSandbox


class LocalSandbox(HostedSandbox):
    """Not isolated. See `Sandbox` for the methods."""

    local = True

    def __init__(self, limits: Limits | None = None, *, unsafe: bool = False) -> None:
        """Starts the shell.

        Raises:
            ValueError: `unsafe` is not True.
        """
        if unsafe is not True:
            raise ValueError("LocalSandbox runs commands on this machine without isolation; pass unsafe=True")
        super().__init__(limits)
