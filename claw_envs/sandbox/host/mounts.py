"""The launcher's own mount namespace, and the sized tmpfs of each sandbox inside it.

Mounts made here are seen by nobody else and vanish with the launcher and its sandboxes, however they end. As root a
mount namespace suffices; an unprivileged user gets it inside a user namespace that maps only that user.
"""

import ctypes
import os
from enum import StrEnum
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_NOSUID, MS_NODEV = 2, 4
MS_REC, MS_SLAVE = 0x4000, 1 << 19
MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


class Privacy(StrEnum):
    """How far the launcher could separate its mounts from the host's."""

    ROOT = "root"
    USER_NAMESPACE = "user namespace"
    NONE = "none"


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: Path | str, kind: str, flags: int, options: str = "") -> None:
    """One mount. Raises OSError."""
    args = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*args), f"mount {kind} on {target}")


def unmount(target: Path) -> None:
    """Detaches the mount at `target` at once; open files in it live on. Raises OSError."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def mount_tmpfs(target: Path, size: int) -> None:
    """A tmpfs of `size` bytes, without devices and setuid programs, at most one inode per 4 KiB."""
    options = f"size={size},nr_inodes={max(1024, size // 4096)},mode=0755"
    mount("claw", target, "tmpfs", MS_NOSUID | MS_NODEV, options)


def new_user_namespace() -> None:
    """Moves this single-threaded process into a user namespace without users yet. Raises OSError."""
    _check(_libc.unshare(CLONE_NEWUSER), "unshare user namespace")


def enter_private() -> tuple[Privacy, Path | None]:
    """Moves this single-threaded process into a private mount namespace.

    Returns:
        How, and the folder of a fresh tmpfs there that every user may traverse; None with `Privacy.NONE`, and then
        nothing was changed.
    """
    # A child tries first: a system may grant the namespace and refuse the mounts, and there is no way back.
    pid = os.fork()
    if pid == 0:
        try:
            _enter()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        return Privacy.NONE, None
    return _enter()


def _enter() -> tuple[Privacy, Path]:
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        _check(_libc.unshare(CLONE_NEWNS), "unshare")
        privacy = Privacy.ROOT
    else:
        _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWUSER), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
        privacy = Privacy.USER_NAMESPACE
    mount("none", "/", "", MS_REC | MS_SLAVE)
    # The host's folders stay reachable except this one, which sandboxes never need.
    top = next(path for path in map(Path, ("/mnt", "/media", "/srv", "/tmp")) if path.is_dir())
    mount("claw", top, "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,mode=0755")
    return privacy, top
