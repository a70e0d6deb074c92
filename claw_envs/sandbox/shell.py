"""One live bash over pipes, driven without ever looking at a prompt.

In: commands. Out: their output, exit code and folder. Each command goes in as `eval '<quoted>'`, with empty standard
input, followed on a line of its own by a `printf` of a fresh token, `$?` and `$PWD` to a status pipe that the command
cannot touch. The token ends the command: what holds the output pipes open (a background job) delays nothing.

At a deadline the processes that the command started are killed and the shell receives a signal whose handler makes it
skip whatever it still had to do (a DEBUG trap under `extdebug`), so loops and lists end while variables live on. A
barrier line then proves that the shell is at rest. Knows nothing of how the shell was started or isolated.
"""

import fcntl
import os
import re
import secrets
import select
import shlex
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from claw_envs.sandbox.host import procs
from claw_envs.sandbox.output import HeadTail

INTERRUPT = 41
"""A real-time signal that no program uses by accident."""
STATUS_FD = 250
GRACE_S = 2.0
"""Time for the shell to come to rest after a deadline; after that it is replaced."""
SWEEPS = 100
TICK_S = 0.25
FLOOD_BYTES = 32 * 2**20
"""Beyond this much output of one command, reading is slowed so that a flood does not take a whole core."""
_MAX_STATUS = 64 * 1024
_CHUNK = 1 << 16
_MARK = "__claw__"
_SKIP = f"case $BASH_COMMAND in *{_MARK}*) ;; *) {{ break 1000; false; }} 2>/dev/null;; esac"
_HANDLER = f"shopt -s extdebug; trap -- {shlex.quote(_SKIP)} DEBUG"


class _Seen(Enum):
    TOKEN = auto()
    END = auto()
    DEADLINE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the shell did with one command."""

    stdout: HeadTail
    stderr: HeadTail
    exit_code: int | None
    """None when it timed out or the shell ended."""
    cwd: str
    timed_out: bool
    ended: bool
    """True when no shell is left, or one that did not come to rest."""


@dataclass(slots=True, kw_only=True)
class Pipes:
    """The four pipes of one process; `theirs` are the ends to hand over."""

    stdin: int
    """-1 once closed."""
    stdout: int
    stderr: int
    status: int
    theirs: tuple[int, int, int, int]

    @classmethod
    def make(cls) -> "Pipes":
        """Opens the pipes, our ends non-blocking."""
        their_in, stdin = os.pipe()
        stdout, their_out = os.pipe()
        stderr, their_err = os.pipe()
        status, their_status = os.pipe()
        for fd in (stdin, stdout, stderr, status):
            os.set_blocking(fd, False)
        theirs = (their_in, their_out, their_err, their_status)
        return cls(stdin=stdin, stdout=stdout, stderr=stderr, status=status, theirs=theirs)

    def close_theirs(self) -> None:
        """After the hand-over."""
        for fd in self.theirs:
            os.close(fd)

    def close_stdin(self) -> None:
        """The other side reads end of file. Idempotent."""
        if self.stdin >= 0:
            os.close(self.stdin)
            self.stdin = -1

    def close(self) -> None:
        """Closes our ends."""
        self.close_stdin()
        for fd in (self.stdout, self.stderr, self.status):
            os.close(fd)


class Shell:
    """The client's end of one bash. One command at a time; not thread-safe."""

    def __init__(
        self, pipes: Pipes, root_pid: int, *, output_bytes: int, prologue: str, lost: Callable[[], bool]
    ) -> None:
        self._pipes = pipes
        self._root = root_pid
        self._limit = output_bytes
        self._lost = lost
        self._status = b""
        self._unsent = b""
        self._spine = [root_pid]
        setup = f"exec {STATUS_FD}>&3 3>&-; trap -- {shlex.quote(_HANDLER)} {INTERRUPT}"
        self._send(f"{setup}\n{prologue}\n")

    def ready(self, timeout_s: float) -> Answer:
        """Waits until the shell answers; a normal answer has exit code 0."""
        answer = self.run(":", timeout_s)
        self._spine = procs.tree(self._root)  # bwrap, its process 1, the shell; locally the shell alone
        return answer

    def close(self) -> None:
        """Closes the pipes; the processes are the launcher's to end."""
        self._pipes.close()

    def run(self, command: str, timeout_s: float) -> Answer:
        """Runs one command to its end or its deadline."""
        out, err = HeadTail(self._limit), HeadTail(self._limit)
        keep = procs.tree(self._root)
        token = secrets.token_hex(8)
        text = command.encode("utf-8", "replace").replace(b"\0", b"").decode()
        self._send(f"eval {shlex.quote(text)} </dev/null {STATUS_FD}>&-\n{self._report(token)}\n")
        deadline = time.monotonic() + timeout_s
        seen, code, cwd = self._pump(token, out, err, deadline)
        timed_out = seen is _Seen.DEADLINE
        if seen is _Seen.END:
            timed_out = not self._outlive(out, err, deadline)
        elif timed_out:
            seen, _, cwd = self._interrupt(keep, out, err)
        return Answer(
            stdout=out,
            stderr=err,
            exit_code=code if seen is _Seen.TOKEN and not timed_out else None,
            cwd=cwd,
            timed_out=timed_out,
            ended=seen is not _Seen.TOKEN,
        )

    @staticmethod
    def _report(token: str) -> str:
        return f"""builtin printf '%s %d %s\\0' {token} $? "${{PWD-}}" >&{STATUS_FD}"""

    def _send(self, text: str) -> None:
        self._unsent += text.encode()

    def _interrupt(self, keep: list[int], out: HeadTail, err: HeadTail) -> tuple[_Seen, int | None, str]:
        token = secrets.token_hex(8)
        if self._unsent:
            return _Seen.DEADLINE, None, ""  # the shell does not even read: nothing can reach it
        procs.send(self._spine[-1], INTERRUPT)
        self._send(f"{_MARK}= trap - DEBUG; shopt -u extdebug; {self._report(token)}\n")
        end = time.monotonic() + GRACE_S
        seen, code, cwd = _Seen.DEADLINE, None, ""
        while seen is _Seen.DEADLINE and time.monotonic() < end:
            procs.kill_all(procs.started(self._root, self._spine, keep))
            seen, code, cwd = self._pump(token, out, err, time.monotonic() + 0.02)
        for _ in range(SWEEPS):  # what the command left in the background
            if not (left := procs.started(self._root, self._spine, keep)):
                return seen, code, cwd
            procs.kill_all(left)
        return _Seen.DEADLINE, None, ""  # something forks faster than it dies: all of it must go

    def _outlive(self, out: HeadTail, err: HeadTail, deadline: float) -> bool:
        """Reads on while a program that took the shell's place (`exec`) runs; False at the deadline."""
        self._pipes.close_stdin()  # ends a shell that merely lost its status pipe
        sinks = {self._pipes.stdout: out, self._pipes.stderr: err}
        while time.monotonic() < deadline and not self._lost():
            sinks = {fd: sink for fd, sink in sinks.items() if _read_all(fd, sink)}
            if not sinks or procs.start_time(self._root) is None:
                return True
            poll = select.poll()
            for fd in sinks:
                poll.register(fd, select.POLLIN)
            poll.poll(20)
        return False

    def _pump(self, token: str, out: HeadTail, err: HeadTail, deadline: float) -> tuple[_Seen, int | None, str]:
        """Moves bytes until the token is seen, the status pipe ends or the deadline passes."""
        pipes = self._pipes
        poll = select.poll()
        sinks = {pipes.stdout: out, pipes.stderr: err}
        for fd in (*sinks, pipes.status):
            poll.register(fd, select.POLLIN)
        while True:
            self._push(poll)
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, min(left, TICK_S)) * 1000))
            if pipes.status in ready and (found := self._read_status(token)) is not None:
                for fd, sink in sinks.items():
                    _drain(fd, sink)
                return found
            for fd, sink in sinks.items():
                if fd in ready and not _read_into(fd, sink):
                    poll.unregister(fd)
            if left <= 0:
                return _Seen.DEADLINE, None, ""
            if self._lost():
                return _Seen.END, None, ""
            if out.total + err.total > FLOOD_BYTES:
                time.sleep(0.001)

    def _push(self, poll: select.poll) -> None:
        if not self._unsent:
            return
        try:
            sent = os.write(self._pipes.stdin, self._unsent)
        except BlockingIOError:
            sent = 0
        except BrokenPipeError:
            sent = len(self._unsent)  # the status pipe says the same
        self._unsent = self._unsent[sent:]
        if self._unsent:
            poll.register(self._pipes.stdin, select.POLLOUT)
        elif sent:
            try:
                poll.unregister(self._pipes.stdin)
            except KeyError:
                return

    def _read_status(self, token: str) -> tuple[_Seen, int | None, str] | None:
        chunk = os.read(self._pipes.status, _CHUNK)
        if not chunk:
            return _Seen.END, None, ""
        *lines, rest = (self._status + chunk).split(b"\0")
        self._status = rest[-_MAX_STATUS:]
        for line in lines:
            # A command may find this pipe and write to it; it can only deceive itself about its exit code.
            found = re.fullmatch(rb"%b (\d{1,3}) (.*)" % token.encode(), line, re.DOTALL)
            if found:
                return _Seen.TOKEN, int(found[1]), found[2].decode("utf-8", "replace")
        return None


def _read_into(fd: int, sink: HeadTail) -> bool:
    """Feeds what is there; False at the end of the stream."""
    try:
        chunk = os.read(fd, _CHUNK)
    except BlockingIOError:
        return True
    sink.feed(chunk)
    return bool(chunk)


def _read_all(fd: int, sink: HeadTail) -> bool:
    """Feeds all that is there, up to a bound; False at the end of the stream."""
    before = sink.total
    while sink.total - before < 16 * _CHUNK:
        at = sink.total
        if not _read_into(fd, sink):
            return False
        if sink.total == at:
            break
    return True


def _drain(fd: int, sink: HeadTail) -> None:
    """Feeds what was written up to now, and no more: a background job may go on writing."""
    waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    while waiting > 0 and (chunk := os.read(fd, min(waiting, _CHUNK))):
        sink.feed(chunk)
        waiting -= len(chunk)


def collect(pipes: Pipes, output_bytes: int, deadline: float) -> tuple[HeadTail, HeadTail, bool]:
    """Reads a program's output to its end; the flag is False when the deadline came first."""
    sinks = {pipes.stdout: HeadTail(output_bytes), pipes.stderr: HeadTail(output_bytes)}
    open_fds = set(sinks)
    poll = select.poll()
    for fd in sinks:
        poll.register(fd, select.POLLIN)
    while open_fds and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            if not _read_into(fd, sinks[fd]):
                poll.unregister(fd)
                open_fds.discard(fd)
    return sinks[pipes.stdout], sinks[pipes.stderr], not open_fds
