"""The sandboxes one launcher holds: made, started, ended, frozen and removed.

In: a sandbox's id, its limits and the descriptors of its processes. Out: folders (as descriptors), process ids, exit
codes. Every sandbox has a lease on disk before anything of it exists.
"""

import os
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import bwrap, cgroups, leases, mounts, spawn
from .mounts import Privacy
from .spawn import Identity

FIRST_UID = 1_900_000_000
"""Above every range that systemd, containers and users hand out."""
UIDS = 100_000_000
PROBE_S = 10.0


class Unavailable(Exception):
    """This machine cannot run the backend; the message names what is missing."""


class Unknown(Exception):
    """No such sandbox here (any more)."""


class Mode(NamedTuple):
    """How bwrap runs here."""

    program: str
    own_uid: bool
    """As root: each sandbox gets a host uid of its own."""
    features: bwrap.Features


class Enforced(NamedTuple):
    """Which limits hold for one sandbox."""

    memory: bool
    pids: bool
    disk: bool


class Held:
    """One sandbox of this launcher."""

    def __init__(
        self, lease: leases.Lease, files: Path, disk_bytes: int, identity: Identity | None, local: bool
    ) -> None:
        self.lease = lease
        self.files = files
        self.local = local
        self.disk_bytes = disk_bytes
        self.identity = identity
        self.group: cgroups.Cgroup | None = None
        self.pid: int | None = None
        self.mounted: list[Path] = []


class Host:
    """Everything this launcher holds. Not thread-safe; the launcher has one thread."""

    def __init__(self, state: Path, owner: int) -> None:
        self.state = leases.open_state(state)
        self.reaped = leases.reap(self.state)
        self._owner = leases.identity(owner)
        self._self = leases.identity(os.getpid())
        self._lease = self._new_lease(f"launcher-{os.getpid()}", float("inf"))
        leases.write(self.state, self._lease)
        self.privacy, top = mounts.enter_private()
        self._top = top or self.state / self._lease.id
        self._etc = self._top / "etc"
        bwrap.make_etc(self._etc)
        self._parent = cgroups.Parent.of_this_process()
        self._mode: Mode | None = None
        self._held: dict[str, Held] = {}

    def _new_lease(self, identifier: str, deadline: float) -> leases.Lease:
        return leases.Lease(identifier, self._owner, self._self, deadline, leases.boot_id(), leases.pid_namespace())

    # -- making -------------------------------------------------------------------------------------------------

    def create(
        self, identifier: str, *, local: bool, memory_bytes: int, pids: int, disk_bytes: int, lease_s: float
    ) -> tuple[Held, Enforced]:
        """Lease, group and files of a new sandbox. Raises Unavailable, OSError; leaves nothing behind then."""
        mode = None if local else self.mode()
        identity = self._identity(identifier) if mode is not None and mode.own_uid else None
        group_name = cgroups.PREFIX + identifier
        lease = self._new_lease(identifier, time.time() + lease_s)
        leases.write(self.state, lease)
        disk = self.privacy is not Privacy.NONE and not local
        files = (self._top if disk else self.state) / identifier / "files"
        held = Held(lease, files, disk_bytes, identity, local)
        self._held[identifier] = held
        try:
            held.group = self._parent.make(group_name, memory_bytes, pids)
            if held.group is not None:
                held.lease = lease._replace(groups=tuple(map(str, held.group.folders)))
                leases.write(self.state, held.lease)
            self._make_folder(held, files, disk)
            owner = identity or Identity(os.getuid(), os.getgid())
            bwrap.make_places(files, owner.uid, owner.gid)
        except OSError:
            self.destroy(identifier)
            raise
        return held, Enforced(memory=held.group is not None, pids=held.group is not None or not local, disk=disk)

    def _make_folder(self, held: Held, folder: Path, limited: bool) -> None:
        folder.mkdir(mode=0o755, parents=True)
        if limited:
            mounts.mount_tmpfs(folder, held.disk_bytes)
            held.mounted.append(folder)

    def _identity(self, identifier: str) -> Identity:
        number = FIRST_UID + zlib.crc32(identifier.encode()) % UIDS
        return Identity(number, number)

    # -- bwrap --------------------------------------------------------------------------------------------------

    def mode(self) -> Mode:
        """The first way in which bwrap runs `true` here, found once. Raises Unavailable."""
        if self._mode is None:
            self._mode = self._find_mode()
        return self._mode

    def _find_mode(self) -> Mode:
        program = _which("bwrap")
        if program is None:
            raise Unavailable(
                "bubblewrap is not installed: run scripts/system-packages (Debian: apt-get install bubblewrap)"
            )
        complaint = ""
        for own_uid in (True, False) if self.privacy is Privacy.ROOT else (False,):
            for nested in (True, False):
                mode = Mode(program, own_uid, bwrap.Features(disable_userns=nested))
                complaint = self._try_mode(mode)
                if not complaint:
                    return mode
        raise Unavailable(f"bubblewrap cannot make a sandbox here: {complaint}")

    def _try_mode(self, mode: Mode) -> str:
        """Runs `true`; returns "" or what bwrap complained about."""
        args = [mode.program, *bwrap.namespace_args(mode.features), *bwrap.system_args(self._etc)]
        args += ["--proc", "/proc", "--dev", "/dev", "--", "/bin/true"]
        identity = self._identity("probe") if mode.own_uid else None
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

    # -- running ------------------------------------------------------------------------------------------------

    def get(self, identifier: str) -> Held:
        """Raises Unknown."""
        try:
            return self._held[identifier]
        except KeyError:
            raise Unknown(f"sandbox {identifier} is closed or its lease is over") from None

    def start_shell(self, identifier: str, fds: Sequence[int]) -> int:
        """Starts the shell; fds are stdin, stdout, stderr and status. Returns the pid of its outermost process."""
        held = self.get(identifier)
        if held.local:
            command = ["/bin/bash", "--noprofile", "--norc"]
            return self._start(held, command, _local_environment(held), fds, str(held.files) + bwrap.WORK)
        args = bwrap.shell_args(bwrap.system_args(self._etc), self._namespace(), held.files)
        return self._start_bwrap(held, args, ["bash", "--noprofile", "--norc"], fds)

    def start_check(self, identifier: str, argv: Sequence[str], fds: Sequence[int]) -> int:
        """Starts a grader's program; fds are stdin, stdout and stderr."""
        held = self.get(identifier)
        if held.local:
            command = [_which(argv[0]) or argv[0], *argv[1:]]
            return self._start(held, command, _local_environment(held), fds, str(held.files) + bwrap.WORK)
        system = bwrap.system_args(self._etc)
        args = bwrap.check_args(system, self._namespace(), held.files, self._grade(held))
        return self._start_bwrap(held, args, argv, fds)

    def _namespace(self) -> list[str]:
        return bwrap.namespace_args(self.mode().features)

    def _start_bwrap(self, held: Held, args: Sequence[str], argv: Sequence[str], fds: Sequence[int]) -> int:
        file = bwrap.as_file(args)
        try:
            command = [self.mode().program, "--args", str(len(fds)), "--", *argv]
            return self._start(held, command, {}, [*fds, file], "/")
        finally:
            os.close(file)

    def _start(self, held: Held, argv: Sequence[str], env: dict[str, str], fds: Sequence[int], folder: str) -> int:
        self.end(held.lease.id, 0.0)
        held.pid = spawn.spawn(argv, env, fds, group=held.group, identity=held.identity, folder=folder)
        held.lease = held.lease._replace(processes=(leases.identity(held.pid),))
        leases.write(self.state, held.lease)
        return held.pid

    def end(self, identifier: str, grace_s: float) -> int | None:
        """Waits `grace_s` for the process tree to end by itself, then kills it.

        Returns the exit code, None when there was no process. Raises OSError when one survived.
        """
        held = self.get(identifier)
        if held.pid is None:
            return None
        code = spawn.wait(held.pid, grace_s) if grace_s > 0 else None
        if code is None:
            code = spawn.end(held.pid)
        gone = held.group is None or cgroups.kill(list(held.group.folders))
        if code is None or not gone:
            raise OSError(f"processes of sandbox {identifier} survive SIGKILL")
        held.pid = None
        return code

    # -- ending -------------------------------------------------------------------------------------------------

    def _grade(self, held: Held) -> Path:
        return held.files.parent / "grade"

    def freeze(self, identifier: str) -> Path:
        """Ends every process and makes the folder with `tests` and `scratch` for checks; returns it."""
        held = self.get(identifier)
        self.end(identifier, 0.0)
        grade = self._grade(held)
        if not grade.exists():
            self._make_folder(held, grade, bool(held.mounted))
            for name in ("tests", "scratch"):
                (grade / name).mkdir(mode=0o755)
                if held.identity is not None:
                    os.chown(grade / name, held.identity.uid, held.identity.gid)
        return grade

    def destroy(self, identifier: str) -> None:
        """Kills and removes everything of one sandbox; what resists is left to the reaper. Idempotent."""
        held = self._held.pop(identifier, None)
        if held is None:
            return
        self._held[identifier] = held
        try:
            self.end(identifier, 0.0)
        except OSError as error:
            spawn.log(str(error))
        del self._held[identifier]
        for folder in reversed(held.mounted):
            try:
                mounts.unmount(folder)
            except OSError as error:
                spawn.log(str(error))
        if held.mounted:
            leases.remove_tree(held.files.parent)
        if held.group is None or cgroups.remove(list(held.group.folders)):
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


def _local_environment(held: Held) -> dict[str, str]:
    name, value = leases.marker(held.lease.id).decode().split("=")
    return bwrap.environment() | {"HOME": str(held.files) + bwrap.HOME, name: value}


def _which(program: str) -> str | None:
    for folder in os.environ.get("PATH", bwrap.PATH).split(":"):
        path = Path(folder) / program
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None
