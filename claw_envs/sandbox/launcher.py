"""The client of the launcher process, over which every sandbox of this process is started.

In: calls from any thread. Out: descriptors and process ids. The launcher is a small single-threaded child
(`sandbox/host`): forking is safe there, and sandboxes tied to its life do not die with whichever of our threads
started them. It is started by the first sandbox and again if it died; the sandboxes of a dead launcher are lost.
Nothing here knows shells, tasks or limits beyond passing them on.
"""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from claw_envs.errors import SandboxError, SandboxLost, SandboxTimeout, SandboxUnavailable
from claw_envs.sandbox.base import Limits
from claw_envs.sandbox.host import leases
from claw_envs.sandbox.host.sandboxes import Part
from claw_envs.sandbox.host.server import MAX_FDS, MAX_MESSAGE

START_S = 20.0
CALL_S = 60.0
EXIT_S = 10.0
_BOOT = "import sys; sys.path.append({folder!r}); from host.server import main; main({fd}, {owner}, {state!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """A new sandbox as the launcher made it."""

    files_fd: int
    """The folder that holds its writable places."""
    events_fd: int | None
    """The kernel's file with the count of out-of-memory kills; None without a control group."""
    uid: int | None
    """Host user of the agent, when it has one of its own."""
    check_uid: int | None
    """Host user of checks, when they have one of their own."""
    disk_limit: bool


class Launcher:
    """One launcher process. Thread-safe; calls wait for one another."""

    def __init__(self, state: Path | None = None) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._serial = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        folder = str(Path(__file__).parent)
        boot = _BOOT.format(
            folder=folder, fd=theirs.fileno(), owner=self.owner, state=str(state or leases.default_state())
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", boot],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._socket.settimeout(START_S)
        try:
            self._receive(0)
        except SandboxError:
            self.close()
            raise
        self._socket.settimeout(CALL_S)

    @property
    def pid(self) -> int:
        """Process id of the launcher."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """False once it died, was closed, or when this process is a fork of the one that started it."""
        return self.owner == os.getpid() and self._socket.fileno() >= 0 and self._process.poll() is None

    def ping(self) -> str:
        """One line on how sandboxes run here. Raises SandboxUnavailable."""
        reply, _ = self._call("ping")
        uid = "a host user of its own" if reply["own_uid"] else "the caller's user"
        return f"bubblewrap under {uid}; private mounts: {reply['privacy']}"

    def create(self, identifier: str, limits: Limits, *, local: bool) -> Created:
        """Makes the files and groups of a sandbox.

        Raises:
            SandboxUnavailable: this machine cannot run the backend.
        """
        reply, fds = self._call(
            "create",
            id=identifier,
            local=local,
            memory_bytes=limits.memory_bytes,
            pids=limits.pids,
            disk_bytes=limits.disk_bytes,
            lease_s=limits.lease_s,
        )
        return Created(
            files_fd=fds[0],
            events_fd=fds[1] if reply["group"] else None,
            uid=_int_or_none(reply["uid"]),
            check_uid=_int_or_none(reply["check_uid"]),
            disk_limit=bool(reply["disk"]),
        )

    def start_shell(self, identifier: str, fds: Sequence[int]) -> int:
        """Starts the shell with `fds` as stdin, stdout, stderr and status; returns its outermost process id."""
        return _int(self._call("shell", fds, id=identifier)[0]["pid"])

    def start_check(self, identifier: str, argv: Sequence[str], fds: Sequence[int]) -> int | None:
        """Starts a grader's program with `fds` as stdin, stdout, stderr; returns its `events_fd`, if any."""
        events = self._call("check", fds, id=identifier, argv=list(argv))[1]
        return events[0] if events else None

    def end(self, identifier: str, part: Part, grace_s: float) -> int | None:
        """Waits `grace_s` for one of the sandbox's process trees to end, then kills it; returns the exit code."""
        return _int_or_none(self._call("end", id=identifier, part=part.value, grace_s=grace_s)[0]["code"])

    def freeze(self, identifier: str) -> None:
        """Kills the sandbox's processes for good."""
        self._call("freeze", id=identifier)

    def open_grade(self, identifier: str) -> int:
        """A descriptor of the folder that holds `tests` and `scratch` of checks."""
        return self._call("grade", id=identifier)[1][0]

    def open_file(self, identifier: str, path: str) -> int | None:
        """Opens a regular file of the agent with the launcher's rights; None when there is none that it may read."""
        try:
            opened = self._call("open", id=identifier, path=path)[1]
        except PermissionError:
            return None
        return opened[0] if opened else None

    def destroy(self, identifier: str) -> None:
        """Kills and removes everything of one sandbox. Idempotent."""
        self._call("destroy", id=identifier)

    def close(self) -> None:
        """Ends the launcher, which removes all its sandboxes first. Idempotent; does nothing in a fork."""
        if self.owner != os.getpid():
            return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # reaches the launcher whoever else holds a copy of the socket
        self._socket.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(EXIT_S)

    def abandon(self) -> None:
        """Drops this process's copy of the socket; for a fork, which must not keep the launcher alive."""
        self._socket.close()

    def _call(self, operation: str, fds: Sequence[int] = (), **fields: object) -> tuple[dict[str, object], list[int]]:
        if self.owner != os.getpid():
            raise SandboxLost("this sandbox belongs to the process that forked this one")
        with self._lock:
            self._serial += 1
            message = json.dumps({"op": operation, "serial": self._serial} | fields).encode()
            if len(message) > MAX_MESSAGE:
                raise ValueError(f"a request of {len(message)} bytes; the launcher takes {MAX_MESSAGE}")
            try:
                socket.send_fds(self._socket, [message], fds)
            except TimeoutError as error:
                raise SandboxTimeout("the sandbox launcher takes no requests") from error
            except OSError as error:
                raise SandboxLost(f"the sandbox launcher is gone: {error}") from error
            return self._receive(self._serial)

    def _receive(self, serial: int) -> tuple[dict[str, object], list[int]]:
        """The answer to request `serial`; older ones, whose callers gave up, are thrown away."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE, MAX_FDS)
            except TimeoutError as error:
                raise SandboxTimeout("the sandbox launcher does not answer") from error
            except OSError as error:
                raise SandboxLost(f"the sandbox launcher is gone: {error}") from error
            if not data:
                raise SandboxLost("the sandbox launcher is gone")
            reply = json.loads(data)
            if reply["serial"] == serial:
                break
            for fd in fds:
                os.close(fd)
        kinds = {
            "unavailable": SandboxUnavailable,
            "lost": SandboxLost,
            "failed": SandboxError,
            "denied": PermissionError,
        }
        if "error" in reply:
            raise kinds[reply["error"]](reply["message"])
        return reply, fds


def _int(value: object) -> int:
    assert isinstance(value, int), value
    return value


def _int_or_none(value: object) -> int | None:
    return None if value is None else _int(value)


_current: Launcher | None = None
_current_lock = threading.Lock()
_hooked = False


def get_launcher() -> Launcher:
    """The launcher of this process, started or restarted where need be.

    Raises:
        SandboxUnavailable: it cannot run here.
    """
    global _current
    with _current_lock:
        if _current is None or not _current.usable:
            if _current is not None:
                _current.close()
            _hook()
            _current = Launcher()
        return _current


def _hook() -> None:
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(close_launcher)
        os.register_at_fork(after_in_child=_forget_current)


def close_launcher() -> None:
    """Ends this process's launcher with all its sandboxes, if there is one; the next sandbox starts another."""
    global _current
    with _current_lock:
        if _current is not None:
            _current.close()
            _current = None


def _forget_current() -> None:
    global _current, _current_lock
    _current_lock = threading.Lock()
    if _current is not None:
        _current.abandon()
        _current = None
