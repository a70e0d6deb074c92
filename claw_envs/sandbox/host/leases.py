"""Who owns which sandbox, on disk, so that another process can remove what a killed owner left.

Each sandbox has a folder `<state>/<id>` with `lease.json`. `reap` removes the processes, groups and folders of every
lease whose owner or launcher is dead or whose time is over. The state folder belongs to one user, mode 0700, and is
refused if it does not, so nobody can plant a lease.
"""

import json
import os
import stat
import time
from pathlib import Path
from typing import NamedTuple

from . import cgroups, procs

LEASE_FILE = "lease.json"
PROCESSES_FILE = "processes"
YOUNG_S = 60.0
"""A folder without a lease is left alone this long: its owner may be about to write one."""


class Lease(NamedTuple):
    """The owner, the deadline and the possible groups of one sandbox; written once, before anything of it exists."""

    id: str
    owner: tuple[int, int]
    """Process id and start time of the program that asked for the sandbox."""
    launcher: tuple[int, int]
    deadline: float
    """Seconds since the epoch."""
    boot_id: str
    pid_namespace: str
    groups: tuple[str, ...] = ()
    """Where its control groups may be."""


class Reaped(NamedTuple):
    """What one `reap` removed."""

    sandboxes: tuple[str, ...]
    processes: int
    failed: tuple[str, ...]
    """Sandboxes of which something could not be removed; the next `reap` tries again."""


def boot_id() -> str:
    """Changes with every boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def pid_namespace() -> str:
    """Names the process id namespace of this process."""
    return str(Path("/proc/self/ns/pid").readlink())


def identity(pid: int) -> tuple[int, int]:
    """`pid` with its start time; -1 when it is gone."""
    start = procs.start_time(pid)
    return pid, -1 if start is None else start


def default_state() -> Path:
    """`$XDG_RUNTIME_DIR/claw`, or `/tmp/claw-<uid>` where there is no such folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK):
        return Path(runtime) / "claw"
    return Path(f"/tmp/claw-{os.getuid()}")


def open_state(path: Path) -> Path:
    """Makes the state folder or checks that it is a real folder of this user that nobody else may enter.

    Raises:
        PermissionError: it is a link, or someone else's, or open to others.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} must be a folder of uid {os.getuid()} with mode 0700; remove it and try again")
    return path


def write(state: Path, lease: Lease) -> None:
    """Writes a lease, once. Raises OSError."""
    folder = state / lease.id
    folder.mkdir(mode=0o700)
    (folder / LEASE_FILE).write_text(json.dumps(lease._asdict()))


def add_process(state: Path, sandbox_id: str, pid: int) -> None:
    """Notes a process tree that a sandbox has started. Raises OSError."""
    with (state / sandbox_id / PROCESSES_FILE).open("a") as file:
        file.write("{} {}\n".format(*identity(pid)))


def processes(folder: Path) -> list[tuple[int, int]]:
    """The noted process trees that still run."""
    try:
        lines = [line.split() for line in (folder / PROCESSES_FILE).read_text().splitlines()]
    except (OSError, ValueError):
        return []
    noted = [(int(pid), int(start)) for pid, start in lines]
    return [(pid, start) for pid, start in noted if procs.alive(pid, start)]


def read(folder: Path) -> Lease | None:
    """The lease in `folder`; None when there is none that can be read."""
    try:
        fields = json.loads((folder / LEASE_FILE).read_bytes())
        return Lease(
            id=str(fields["id"]),
            owner=_pair(fields["owner"]),
            launcher=_pair(fields["launcher"]),
            deadline=float(fields["deadline"]),
            boot_id=str(fields["boot_id"]),
            pid_namespace=str(fields["pid_namespace"]),
            groups=tuple(str(group) for group in fields["groups"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _pair(value: list[int]) -> tuple[int, int]:
    pid, start = value
    return int(pid), int(start)


def over(lease: Lease, now: float) -> bool:
    """True when nobody may use this sandbox any more."""
    if now > lease.deadline or lease.boot_id != boot_id():
        return True
    if lease.pid_namespace != pid_namespace():
        return False  # its owner cannot be seen from here
    return not (procs.alive(*lease.owner) and procs.alive(*lease.launcher))


def reap(state: Path, now: float | None = None) -> Reaped:
    """Removes what dead owners and expired leases left. Safe to run from many processes at once."""
    now = time.time() if now is None else now
    gone: list[str] = []
    failed: list[str] = []
    killed = 0
    for folder in sorted(state.iterdir()) if state.is_dir() else ():
        lease = read(folder)
        if lease is None:
            if _young(folder, now):
                continue
        elif not over(lease, now):
            continue
        else:
            killed += _kill(folder, lease)
        clean = remove_tree(folder) and (lease is None or cgroups.remove(ours(lease.groups)))
        (gone if clean else failed).append(folder.name)
    return Reaped(tuple(gone), killed, tuple(failed))


def _young(folder: Path, now: float) -> bool:
    try:
        return now - folder.lstat().st_mtime < YOUNG_S
    except OSError:
        return True


def ours(groups: tuple[str, ...]) -> list[Path]:
    """The listed groups that carry our name."""
    return [Path(group) for group in groups if Path(group).name.startswith(cgroups.PREFIX)]


def _kill(folder: Path, lease: Lease) -> int:
    if lease.boot_id != boot_id() or lease.pid_namespace != pid_namespace():
        return 0
    victims = set(cgroups.members(ours(lease.groups)))
    victims |= set(procs.marked(marker(lease.id)))
    for pid, _ in processes(folder):
        victims |= set(procs.tree(pid))
    procs.kill_all(victims)
    cgroups.kill(ours(lease.groups))
    return len(victims)


def marker(sandbox_id: str) -> bytes:
    """The entry by which processes of a sandbox can be told from their environment."""
    return f"CLAW_SANDBOX_ID={sandbox_id}".encode()


def kill_marked(sandbox_id: str, rounds: int = 20) -> bool:
    """Kills processes that carry the sandbox's mark wherever they went; False when some are left."""
    for _ in range(rounds):
        pids = procs.marked(marker(sandbox_id))
        if not pids:
            return True
        procs.kill_all(pids)
    return not procs.marked(marker(sandbox_id))


def remove_tree(folder: Path) -> bool:
    """Removes a folder of ours, whatever permissions a dead agent left in it; False when something stayed."""
    import shutil  # loads four compression libraries; the launcher starts without them

    if not folder.is_dir() or folder.is_symlink():
        folder.unlink(missing_ok=True)
        return True
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        folder.chmod(0o700)
        for parent, names, _ in os.walk(folder):
            for path in (Path(parent) / name for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
