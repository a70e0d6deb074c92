"""Memory and process limits by control groups, version 1 and 2.

In: a sandbox's id and its limits. Out: a `Cgroup` that a child joins before it becomes the sandbox. Groups are made
under the caller's own where the system lets it, so that limits around us keep holding. Where none can be made the
answer is None and the sandbox reports the limit as not enforced.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from . import procs

PREFIX = "claw-"
CONTROLLERS = ("memory", "pids")


class Mount(NamedTuple):
    """One mounted hierarchy: its controllers (empty for version 2), mount point and root inside the hierarchy."""

    controllers: frozenset[str]
    point: Path
    root: str


class Cgroup(NamedTuple):
    """The group of one sandbox: one folder (version 2) or one per controller (version 1)."""

    folders: tuple[Path, ...]
    events: Path
    """The file with the kernel's `oom_kill` count."""

    def join(self) -> None:
        """Moves the calling process in. Raises OSError."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text("0")


def mounts(mountinfo: str) -> list[Mount]:
    """The hierarchies in the text of /proc/self/mountinfo."""
    found: list[Mount] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup2":
            found.append(Mount(frozenset(), Path(left.split()[4]), left.split()[3]))
        elif kind == "cgroup":
            held = frozenset(options.split(",")) & frozenset(CONTROLLERS)
            if held:
                found.append(Mount(held, Path(left.split()[4]), left.split()[3]))
    return found


def own_paths(cgroup: str) -> dict[str, str]:
    """Controller -> path of this process, from the text of /proc/self/cgroup; "" stands for version 2."""
    paths: dict[str, str] = {}
    for line in cgroup.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    return paths


def _below(mount: Mount, path: str) -> Path:
    inside = path.removeprefix(mount.root) if mount.root != "/" else path
    return mount.point / inside.lstrip("/")


class Parent:
    """Where groups of sandboxes are made; found once, at the first sandbox."""

    def __init__(self, mountinfo: str, cgroup: str) -> None:
        self._mounts = mounts(mountinfo)
        self._own = own_paths(cgroup)

    @classmethod
    def of_this_process(cls) -> "Parent":
        """The parent that /proc/self describes."""
        return cls(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())

    def candidates(self, name: str) -> list[Path]:
        """Every folder that `make` might make."""
        parents: list[Path] = []
        for mount in self._mounts:
            for controller in sorted(mount.controllers):
                parents += _candidates_v1(mount, self._own.get(controller, "/"))
            if not mount.controllers:
                parents += _candidates_v2(mount, self._own.get("", "/"))
        return [parent / name for parent in dict.fromkeys(parents)]

    def make(self, name: str, memory_bytes: int, pids: int) -> Cgroup | None:
        """A new group with limits, or None where the system does not let us."""
        return self._make_v1(name, memory_bytes, pids) or self._make_v2(name, memory_bytes, pids)

    def _make_v1(self, name: str, memory_bytes: int, pids: int) -> Cgroup | None:
        made: dict[str, Path] = {}
        for controller in CONTROLLERS:
            mount = next((m for m in self._mounts if controller in m.controllers), None)
            folder = None if mount is None else _make_below(_candidates_v1(mount, self._own.get(controller, "/")), name)
            if folder is None:
                remove(list(made.values()))
                return None
            made[controller] = folder
        try:
            (made["memory"] / "memory.limit_in_bytes").write_text(str(memory_bytes))
            _try_write(made["memory"] / "memory.memsw.limit_in_bytes", str(memory_bytes))
            (made["pids"] / "pids.max").write_text(str(pids))
        except OSError:
            remove(list(made.values()))
            return None
        return Cgroup(tuple(dict.fromkeys(made.values())), made["memory"] / "memory.oom_control")

    def _make_v2(self, name: str, memory_bytes: int, pids: int) -> Cgroup | None:
        for mount in (m for m in self._mounts if not m.controllers):
            for parent in _candidates_v2(mount, self._own.get("", "/")):
                if (group := _make_limited_v2(parent, name, memory_bytes, pids)) is not None:
                    return group
        return None


def _candidates_v1(mount: Mount, path: str) -> list[Path]:
    return [_below(mount, path), mount.point]


def _candidates_v2(mount: Mount, path: str) -> list[Path]:
    own = _below(mount, path)
    return [parent for parent in (own, *own.parents) if parent.is_relative_to(mount.point)]


def _make_below(parents: list[Path], name: str) -> Path | None:
    for parent in parents:
        try:
            (parent / name).mkdir()
        except OSError:
            continue
        return parent / name
    return None


def _make_limited_v2(parent: Path, name: str, memory_bytes: int, pids: int) -> Cgroup | None:
    folder = parent / name
    enabled = parent / "cgroup.subtree_control"
    try:
        if not set(CONTROLLERS) <= set(enabled.read_text().split()):
            enabled.write_text("+memory +pids")
        folder.mkdir()
        (folder / "memory.max").write_text(str(memory_bytes))
        (folder / "pids.max").write_text(str(pids))
    except OSError:
        remove([folder])
        return None
    _try_write(folder / "memory.swap.max", "0")
    return Cgroup((folder,), folder / "memory.events")


def _try_write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:
        return


def members(folders: list[Path]) -> list[int]:
    """Processes in these groups; a group that is gone has none."""
    found: list[int] = []
    for folder in folders:
        try:
            found += [int(line) for line in (folder / "cgroup.procs").read_text().split()]
        except OSError:
            continue
    return sorted(set(found))


def kill(folders: list[Path], timeout_s: float = 5.0) -> bool:
    """Kills every member until none is left; False when some outlived `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while pids := members(folders):
        if time.monotonic() > deadline:
            return False
        procs.kill_all(pids)
        time.sleep(0.001)
    return True


def remove(folders: list[Path], timeout_s: float = 1.0) -> bool:
    """Removes emptied groups; False when one would not go. Only folders of ours are touched."""
    deadline = time.monotonic() + timeout_s
    for folder in folders:
        assert folder.name.startswith(PREFIX), folder
        while folder.exists():
            try:
                os.rmdir(folder)  # noqa: PTH106 - the control files inside make every other removal wrong
            except OSError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
    return True


def oom_kills(text: bytes) -> int:
    """The `oom_kill` count in the text of the events file; 0 when it has none."""
    for line in text.splitlines():
        if line.startswith(b"oom_kill "):
            return int(line.split()[1])
    return 0
