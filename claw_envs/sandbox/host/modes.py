"""Finding out once per launcher how bubblewrap runs on this machine.

In: how private our mounts are. Out: the strictest way in which it runs a shell, or what it complained about.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import bwrap, spawn
from .mounts import Privacy
from .spawn import Identity

PROBE_S = 10.0
MISSING = "bubblewrap is not installed: run scripts/system-packages (Debian: apt-get install bubblewrap)"


class Unavailable(Exception):
    """This machine cannot run the backend; the message names what is missing."""


class Mode(NamedTuple):
    """How bwrap runs here."""

    program: str
    own_uid: bool
    """As root: each sandbox gets host users of its own, one for the agent and one for checks."""
    no_nesting: bool
    """User namespaces inside the sandbox are forbidden."""


def which(program: str) -> str | None:
    """The absolute path of a program; None when PATH does not have it."""
    for folder in os.environ.get("PATH", bwrap.PATH).split(":"):
        path = Path(folder) / program
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None


def find_mode(privacy: Privacy, etc: Path, agent: Identity) -> Mode:
    """The first of the agent's modes, strictest first, that works. Raises Unavailable."""
    program = which("bwrap")
    if program is None:
        raise Unavailable(MISSING)
    if not Path("/proc/thread-self/children").exists():
        raise Unavailable("this kernel does not list children in /proc (CONFIG_PROC_CHILDREN)")
    complaint = ""
    for own_uid in (True, False) if privacy is Privacy.ROOT else (False,):
        for no_nesting in (True, False):
            mode = Mode(program, own_uid, no_nesting)
            complaint = attempt(mode, bwrap.agent_namespaces(no_nesting), etc, agent if own_uid else None)
            if not complaint:
                return mode
    raise Unavailable(f"bubblewrap cannot make a sandbox here: {complaint}")


def attempt(mode: Mode, namespaces: Sequence[str], etc: Path, identity: Identity | None) -> str:
    """Runs a shell in a sandbox; returns "" or what bwrap complained about."""
    args = [mode.program, *bwrap.probe_args(bwrap.system_args(etc), namespaces), "--", "bash", "-c", ":"]
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        pid = spawn.spawn(args, {}, [null, null, writer], identity=identity)
        code = spawn.wait(pid, PROBE_S)
        if code is None:
            spawn.end(pid)
        os.write(writer, b"\n")  # so that the read below cannot block
        said = os.read(reader, 4096).decode(errors="replace").strip()
        return "" if code == 0 else said or f"exit code {code}"
    finally:
        for fd in (reader, writer, null):
            os.close(fd)
