"""The launcher process: one thread, one socket, one request at a time.

In: JSON requests with descriptors over a Unix socket pair. Out: JSON replies with descriptors. When the socket closes
or the owner dies, everything held here is killed and removed, then the process exits. Started by
`claw_envs.sandbox.launcher`, before which it imports nothing of the package.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .modes import Unavailable
from .sandboxes import Host, Part, Request, Unknown

MAX_MESSAGE = 64 * 1024
MAX_FDS = 8
Json = dict[str, object]


class Reply(NamedTuple):
    """The answer to one request, and descriptors that are closed once sent."""

    fields: Json
    fds: tuple[int, ...] = ()


class Server:
    """Turns requests into calls of `Host`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._operations: dict[str, Callable[[Json, list[int]], Reply]] = {
            "ping": self._ping,
            "create": self._create,
            "shell": self._shell,
            "check": self._check,
            "end": self._end,
            "freeze": self._freeze,
            "grade": self._grade,
            "open": self._open,
            "destroy": self._destroy,
        }

    def answer(self, request: Json, fds: list[int]) -> Reply:
        """Carries out one request; a failure becomes a reply with `error` and `message`."""
        try:
            return self._operations[str(request["op"])](request, fds)
        except Unavailable as error:
            return Reply({"error": "unavailable", "message": str(error)})
        except Unknown as error:
            return Reply({"error": "lost", "message": str(error)})
        except PermissionError as error:
            return Reply({"error": "denied", "message": str(error)})
        except (OSError, KeyError, ValueError) as error:
            return Reply({"error": "failed", "message": f"{type(error).__name__}: {error}"})
        finally:
            for fd in fds:
                os.close(fd)

    def _ping(self, request: Json, fds: list[int]) -> Reply:
        mode = self._host.mode()
        return Reply({"privacy": self._host.privacy.value, "own_uid": mode.own_uid})

    def _create(self, request: Json, fds: list[int]) -> Reply:
        held = self._host.create(
            Request(
                str(request["id"]),
                local=bool(request["local"]),
                memory_bytes=_int(request, "memory_bytes"),
                pids=_int(request, "pids"),
                disk_bytes=_int(request, "disk_bytes"),
                lease_s=_float(request, "lease_s"),
            )
        )
        group = held.groups.get(Part.SHELL)
        opened = [os.open(held.files, os.O_RDONLY | os.O_DIRECTORY)]
        opened += [] if group is None else [os.open(group.events, os.O_RDONLY)]
        fields: Json = {
            "group": group is not None,
            "disk": bool(held.mounted),
            "uid": None if held.agent is None else held.agent.uid,
            "check_uid": None if held.checker is None else held.checker.uid,
        }
        return Reply(fields, tuple(opened))

    def _shell(self, request: Json, fds: list[int]) -> Reply:
        return Reply({"pid": self._host.start_shell(str(request["id"]), fds)})

    def _check(self, request: Json, fds: list[int]) -> Reply:
        argv = request["argv"]
        if not isinstance(argv, list) or not argv:
            raise ValueError("argv must be a list of at least one word")
        identifier = str(request["id"])
        pid = self._host.start_check(identifier, [str(word) for word in argv], fds)
        group = self._host.get(identifier).groups.get(Part.CHECK)
        return Reply({"pid": pid}, () if group is None else (os.open(group.events, os.O_RDONLY),))

    def _end(self, request: Json, fds: list[int]) -> Reply:
        part = Part(str(request["part"]))
        return Reply({"code": self._host.end(str(request["id"]), part, _float(request, "grace_s"))})

    def _freeze(self, request: Json, fds: list[int]) -> Reply:
        self._host.freeze(str(request["id"]))
        return Reply({})

    def _grade(self, request: Json, fds: list[int]) -> Reply:
        return Reply({}, (os.open(self._host.open_grade(str(request["id"])), os.O_RDONLY | os.O_DIRECTORY),))

    def _open(self, request: Json, fds: list[int]) -> Reply:
        fd = self._host.open_file(str(request["id"]), str(request["path"]))
        return Reply({}, () if fd is None else (fd,))

    def _destroy(self, request: Json, fds: list[int]) -> Reply:
        self._host.destroy(str(request["id"]))
        return Reply({})


def _int(request: Json, name: str) -> int:
    value = request[name]
    if not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    return value


def _float(request: Json, name: str) -> float:
    value = request[name]
    if not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def serve(connection: socket.socket, owner: int, host: Host) -> None:
    """Answers until the other end closes or process `owner` (a pidfd) ends."""
    server = Server(host)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(owner, select.POLLIN)
    while True:
        ready = dict(poll.poll(int(host.expire() * 1000) + 1))
        if owner in ready:
            return
        if connection.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(connection, MAX_MESSAGE, MAX_FDS)
        if not data:
            return
        request = json.loads(data)
        reply = server.answer(request, fds)
        try:
            socket.send_fds(connection, [_encode(reply.fields, request["serial"])], reply.fds)
        except OSError:
            return
        finally:
            for fd in reply.fds:
                os.close(fd)


def _encode(fields: Json, serial: object) -> bytes:
    return json.dumps({**fields, "serial": serial}).encode()


def main(fd: int, owner: int, state: str) -> None:
    """Entry point of the launcher process."""
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, _leave)
    os.umask(0o022)
    connection = socket.socket(fileno=fd)
    try:
        watch = os.pidfd_open(owner)
        host = Host(Path(state), owner)
    except OSError as error:
        connection.send(_encode({"error": "unavailable", "message": str(error)}, 0))
        return
    connection.send(_encode({}, 0))
    try:
        serve(connection, watch, host)
    finally:
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        host.close()


def _leave(_number: int, _frame: object) -> None:
    sys.exit(0)
