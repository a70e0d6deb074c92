"""The sandboxes one launcher holds: made, started, ended, frozen and removed.

In: a sandbox's id, its limits and the descriptors of its processes. Out: folders, process ids, exit codes. Every
sandbox has a lease on disk before anything of it exists. It has at most two process trees: the agent's shell, and a
check, which has a group of its own so that an agent cannot starve its grader.
"""

import os
import time
import zlib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from . import bwrap, cgroups, files, leases, modes, mounts, spawn
from .modes import Mode
from .mounts import Privacy
from .spawn import Identity

FIRST_UID = 1_900_000_000
"""Above every range that systemd, containers and users hand out."""
UID_PAIRS = 50_000_000


class Unknown(Exception):
    """No such sandbox here (any more)."""


class Part(StrEnum):
    """The two process trees of a sandbox."""

    SHELL = "shell"
    CHECK = "check"


class Request(NamedTuple):
    """What a new sandbox shall be."""

    id: str
    local: bool
    """No isolation."""
    memory_bytes: int
    pids: int
    disk_bytes: int
    lease_s: float


class Held:
    """One sandbox of this launcher."""

    def __init__(self, request: Request, lease: leases.Lease, folder: Path, own_uid: bool) -> None:
        self.request = request
        self.lease = lease
        self.folder = folder
        pair = FIRST_UID + 2 * (zlib.crc32(request.id.encode()) % UID_PAIRS)
        self.agent = Identity(pair) if own_uid else None
        self.checker = Identity(pair + 1, also=pair) if own_uid else None
        self.groups: dict[Part, cgroups.Cgroup] = {}
        self.pids: dict[Part, int] = {}
        self.mounted: list[Path] = []
        self.frozen = False

    @property
    def files(self) -> Path:
        """Holds the agent's writable places."""
        return self.folder / "files"

    @property
    def grade(self) -> Path:
        """Holds what checks see and the agent never does."""
        return self.folder / "grade"


class Host:
    """Everything this launcher holds. Not thread-safe; the launcher has one thread."""

    def __init__(self, state: Path, owner: int) -> None:
        """Removes what dead owners left, then makes mounts private. Raises OSError."""
        self.state = leases.open_state(state)
        leases.reap(self.state)
        self._owner = leases.identity(owner)
        self._self = leases.identity(os.getpid())
        self._parent = cgroups.Parent.of_this_process()
        self._lease = self._new_lease(f"launcher-{os.urandom(8).hex()}", float("inf"))
        leases.write(self.state, self._lease)
        self.privacy, top = mounts.enter_private()
        self._top = top or self.state / self._lease.id
        self._etc = self._top / "etc"
        bwrap.make_etc(self._etc)
        self._mode: Mode | None = None
        self._checks_apart: bool | None = None
        self._held: dict[str, Held] = {}

    def _new_lease(self, identifier: str, deadline: float) -> leases.Lease:
        groups = [path for part in Part for path in self._parent.candidates(_group_name(identifier, part))]
        return leases.Lease(
            identifier,
            self._owner,
            self._self,
            deadline,
            leases.boot_id(),
            leases.pid_namespace(),
            tuple(map(str, groups)),
        )

    def mode(self) -> Mode:
        """How bwrap runs here, found once. Raises Unavailable."""
        if self._mode is None:
            self._mode = modes.find_mode(self.privacy, self._etc, Identity(FIRST_UID - 2))
        return self._mode

    def get(self, identifier: str) -> Held:
        """Raises Unknown."""
        try:
            return self._held[identifier]
        except KeyError:
            raise Unknown(f"sandbox {identifier} is closed or its lease is over") from None

    # -- making -------------------------------------------------------------------------------------------------

    def create(self, request: Request) -> Held:
        """Lease, group and files of a new sandbox. Raises Unavailable, OSError; leaves nothing behind then."""
        own_uid = not request.local and self.mode().own_uid
        lease = self._new_lease(request.id, time.time() + request.lease_s)
        limited = self.privacy is not Privacy.NONE and not request.local
        held = Held(request, lease, (self._top if limited else self.state) / request.id, own_uid)
        self._held[request.id] = held
        try:
            leases.write(self.state, lease)
            self._add_group(held, Part.SHELL)
            self._make_folder(held, held.files, limited)
            bwrap.make_places(held.files, None if held.agent is None else held.agent.uid)
        except OSError:
            self.destroy(request.id)
            raise
        return held

    def _add_group(self, held: Held, part: Part) -> None:
        group = self._parent.make(_group_name(held.request.id, part), held.request.memory_bytes, held.request.pids)
        if group is not None:
            held.groups[part] = group

    def _make_folder(self, held: Held, folder: Path, limited: bool) -> None:
        folder.mkdir(mode=0o755, parents=True)
        if limited:
            mounts.mount_tmpfs(folder, held.request.disk_bytes)
            held.mounted.append(folder)

    # -- running ------------------------------------------------------------------------------------------------

    def start_shell(self, identifier: str, fds: Sequence[int]) -> int:
        """Starts the shell; fds are stdin, stdout, stderr and status. Returns the pid of its outermost process."""
        held = self.get(identifier)
        if held.frozen:
            raise OSError("a frozen sandbox runs no shell")
        shell = ["bash", "--noprofile", "--norc"]
        if held.request.local:
            return self._start_local(held, Part.SHELL, shell, fds)
        namespaces = bwrap.agent_namespaces(self.mode().no_nesting)
        args = bwrap.shell_args(bwrap.system_args(self._etc), namespaces, held.files)
        return self._start_bwrap(held, Part.SHELL, args, shell, fds, held.agent)

    def start_check(self, identifier: str, argv: Sequence[str], fds: Sequence[int]) -> int:
        """Starts a grader's program; fds are stdin, stdout and stderr. Returns its outermost process id."""
        held = self.get(identifier)
        self.open_grade(identifier)
        if Part.CHECK not in held.groups:
            self._add_group(held, Part.CHECK)
        if held.request.local:
            return self._start_local(held, Part.CHECK, argv, fds)
        if Part.CHECK not in held.groups:
            argv = bwrap.limited(argv, held.request.pids, held.request.memory_bytes)
        apart = held.checker is not None and self._can_check_apart(held.checker)
        namespaces = bwrap.apart_check_namespaces() if apart else bwrap.check_namespaces(self.mode().no_nesting)
        args = bwrap.check_args(bwrap.system_args(self._etc), namespaces, held.files, held.grade)
        return self._start_bwrap(held, Part.CHECK, args, argv, fds, held.checker if apart else held.agent)

    def _can_check_apart(self, checker: Identity) -> bool:
        if self._checks_apart is None:
            complaint = modes.attempt(self.mode(), bwrap.apart_check_namespaces(), self._etc, checker)
            self._checks_apart = not complaint
        return self._checks_apart

    def _start_local(self, held: Held, part: Part, argv: Sequence[str], fds: Sequence[int]) -> int:
        name, value = leases.marker(held.request.id).decode().split("=")
        environment = bwrap.environment() | {"HOME": str(held.files) + bwrap.HOME, name: value}
        command = [modes.which(argv[0]) or argv[0], *argv[1:]]
        self.end(held.request.id, part, 0.0)
        folder = str(held.files) + bwrap.WORK
        pid = spawn.spawn(command, environment, fds, group=held.groups.get(part), folder=folder)
        return self._started(held, part, pid)

    def _start_bwrap(
        self,
        held: Held,
        part: Part,
        args: Sequence[str],
        argv: Sequence[str],
        fds: Sequence[int],
        identity: Identity | None,
    ) -> int:
        self.end(held.request.id, part, 0.0)
        file = bwrap.as_file(args)
        try:
            command = [self.mode().program, "--args", str(len(fds)), "--", *argv]
            pid = spawn.spawn(command, {}, [*fds, file], group=held.groups.get(part), identity=identity)
        finally:
            os.close(file)
        return self._started(held, part, pid)

    def _started(self, held: Held, part: Part, pid: int) -> int:
        held.pids[part] = pid
        leases.add_process(self.state, held.request.id, pid)
        return pid

    def end(self, identifier: str, part: Part, grace_s: float) -> int | None:
        """Waits `grace_s` for a process tree to end by itself, then kills it.

        Returns the exit code, None when there was no process. Raises OSError when one survived.
        """
        held = self.get(identifier)
        pid = held.pids.get(part)
        if pid is None:
            return None
        code = spawn.wait(pid, grace_s) if grace_s > 0 else None
        if code is None:
            code = spawn.end_tree(pid) if held.request.local else spawn.end(pid)
        group = held.groups.get(part)
        gone = leases.kill_marked(identifier) if held.request.local else True
        if group is not None:
            gone = cgroups.kill(list(group.folders)) and gone
        if code is None or not gone:
            raise OSError(f"processes of sandbox {identifier} survive SIGKILL")
        del held.pids[part]
        return code

    # -- ending -------------------------------------------------------------------------------------------------

    def open_grade(self, identifier: str) -> Path:
        """Makes, once, the folder with `tests` and `scratch` for checks; returns it."""
        held = self.get(identifier)
        if not held.grade.exists():
            self._make_folder(held, held.grade, bool(held.mounted))
            for name in ("tests", "scratch"):
                (held.grade / name).mkdir(mode=0o755)
                if held.checker is not None:
                    os.chown(held.grade / name, held.checker.uid, held.checker.uid)
        return held.grade

    def open_file(self, identifier: str, path: str) -> int | None:
        """Opens one of the agent's regular files, with this process's rights. Raises OSError."""
        root = os.open(self.get(identifier).files, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return files.open_regular(root, path)
        finally:
            os.close(root)

    def freeze(self, identifier: str) -> None:
        """Ends every process for good; no shell can be started after this."""
        held = self.get(identifier)
        held.frozen = True
        for part in Part:
            self.end(identifier, part, 0.0)

    def destroy(self, identifier: str) -> None:
        """Kills and removes everything of one sandbox; what resists is left to the reaper. Idempotent."""
        held = self._held.get(identifier)
        if held is None:
            return
        for part in Part:
            try:
                self.end(identifier, part, 0.0)
            except OSError as error:
                spawn.log(str(error))
        del self._held[identifier]
        for folder in reversed(held.mounted):
            try:
                mounts.unmount(folder)
            except OSError as error:
                spawn.log(str(error))
        leases.remove_tree(held.folder)
        if all(cgroups.remove(list(group.folders)) for group in held.groups.values()):
            leases.remove_tree(self.state / identifier)

    def expire(self) -> float:
        """Destroys sandboxes whose lease is over; returns the seconds until the next one is."""
        now = time.time()
        for identifier in [key for key, held in self._held.items() if held.lease.deadline <= now]:
            self.destroy(identifier)
        deadlines = [held.lease.deadline for held in self._held.values()]
        return max(0.0, min(deadlines, default=now + 3600.0) - now)

    def close(self) -> None:
        """Destroys everything this launcher holds and what others left."""
        for identifier in list(self._held):
            self.destroy(identifier)
        leases.remove_tree(self.state / self._lease.id)
        leases.reap(self.state)


def _group_name(identifier: str, part: Part) -> str:
    return f"{cgroups.PREFIX}{identifier}-{part.value}"
