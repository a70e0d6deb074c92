"""Looking at processes through /proc and ending them without hitting a stranger.

In: process ids. Out: trees of ids, start times, signals sent. A process id can be reused between a look and a kill,
so a signal goes through a pidfd whose process is compared again after it was opened.
"""

import os
import signal
from collections.abc import Collection, Iterable
from pathlib import Path

PROC = Path("/proc")


def start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid`; None when there is no such process or it is a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def alive(pid: int, start: int) -> bool:
    """True when `pid` is still the process that started at `start`."""
    return start_time(pid) == start


def children(pid: int) -> list[int]:
    """Direct children of every thread of `pid`; empty when it is gone."""
    found: list[int] = []
    try:
        threads = list((PROC / str(pid) / "task").iterdir())
    except OSError:
        return found
    for thread in threads:
        try:
            found += [int(child) for child in (thread / "children").read_bytes().split()]
        except OSError:
            continue
    return found


def tree(root: int) -> list[int]:
    """`root` and all its descendants, breadth first."""
    order = [root]
    for pid in order:
        order += [child for child in children(pid) if child not in order]
    return order


def send(pid: int, sig: int, start: int | None = None) -> bool:
    """Signals `pid`; with `start`, only if it is still that process. False when it was not there."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start is not None and not alive(pid, start):
            return False
        signal.pidfd_send_signal(handle, sig)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def kill_all(pids: Iterable[int]) -> None:
    """Stops every process first, so that none can fork on, then kills them."""
    known = [(pid, start) for pid in pids if (start := start_time(pid)) is not None]
    for sig in (signal.SIGSTOP, signal.SIGKILL):
        for pid, start in known:
            send(pid, sig, start)


def started(root: int, spine: Collection[int], keep: Collection[int]) -> list[int]:
    """Descendants of `root` that are not in `keep`, except what other kept processes than `spine` started."""
    order = [root]
    for pid in order:
        if pid in spine or pid not in keep:
            order += [child for child in children(pid) if child not in order]
    return [pid for pid in order if pid not in keep]


def marked(marker: bytes) -> list[int]:
    """Processes whose environment at their start held `marker`; only those we may look at."""
    found: list[int] = []
    for folder in PROC.iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found
