"""Reading and writing files below a folder whose content is hostile.

In: a descriptor of a sandbox's folder and absolute paths as the sandbox sees them. Out: bytes. Links are resolved as
inside the sandbox and can never lead out of the folder (openat2 with RESOLVE_IN_ROOT; where the kernel lacks it,
links are not followed at all). A FIFO, socket, device or folder is never opened for reading.
"""

import ctypes
import errno
import os
import secrets
import stat
from pathlib import PurePosixPath

_OPENAT2 = 437
_RESOLVE_NO_XDEV, _RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x01, 0x02, 0x10
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.ENAMETOOLONG})
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def open_in(root: int, path: str, flags: int, mode: int = 0) -> int:
    """Opens `path` as if `root` were the root folder; returns a descriptor.

    Raises:
        OSError: as open(2) would inside; ELOOP or EXDEV where a link leads out.
    """
    how = _OpenHow(flags | os.O_CLOEXEC, mode, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS | _RESOLVE_NO_XDEV)
    fd = _libc.syscall(_OPENAT2, root, os.fsencode(path), ctypes.byref(how), ctypes.c_size_t(ctypes.sizeof(how)))
    if fd >= 0:
        return fd
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EPERM):
        return _walk(root, path, flags, mode)
    raise OSError(code, os.strerror(code), path)


def _walk(root: int, path: str, flags: int, mode: int) -> int:
    *folders, last = ["."] + [part for part in PurePosixPath(path).parts if part not in ("/", ".", "..")]
    current = os.dup(root)
    try:
        for part in folders:
            below = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=current)
            os.close(current)
            current = below
        return os.open(last, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=current)
    finally:
        os.close(current)


def open_regular(root: int, path: str) -> int | None:
    """Opens a regular file for reading; None when there is none at `path`.

    Raises:
        PermissionError: the caller may not read it or not reach it.
    """
    try:
        found = open_in(root, path, os.O_PATH)
    except OSError as error:
        if error.errno in _MISSING:
            return None
        raise
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            return None
        return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(found)


def read_open(fd: int, path: str, max_bytes: int) -> bytes:
    """The bytes of an open regular file, which is closed. Raises ValueError when it is longer than `max_bytes`."""
    try:
        size = os.fstat(fd).st_size
        data = b"" if size > max_bytes else _read_up_to(fd, max_bytes + 1)
    finally:
        os.close(fd)
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"{path} has {max(size, len(data))} bytes, more than the {max_bytes} allowed")
    return data


def _read_up_to(fd: int, limit: int) -> bytes:
    data = bytearray()
    while len(data) < limit and (chunk := os.read(fd, min(limit - len(data), 1 << 20))):
        data += chunk
    return bytes(data)


def write(root: int, path: str, data: bytes, mode: int, owner: int | None) -> None:
    """Replaces whatever is at `path` by a file, parents included; a link or FIFO there is not followed.

    Args:
        root: descriptor of the folder that counts as `/`.
        path: absolute path inside.
        data: the whole content.
        mode: permission bits.
        owner: user and group of the file and of parents that are made; None keeps the caller's.

    Raises:
        OSError: the disk of the sandbox is full, or a parent is no folder.
    """
    target = PurePosixPath(path)
    folder = make_folders(root, target.parent, owner)
    fresh = f".claw-{secrets.token_hex(8)}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            if owner is not None:
                os.fchown(fd, owner, owner)
            os.fchmod(fd, mode)
            os.rename(fresh, target.name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.unlink(fresh, dir_fd=folder)
            raise
        finally:
            os.close(fd)
    finally:
        os.close(folder)


def make_folders(root: int, path: PurePosixPath, owner: int | None) -> int:
    """Opens the folder at `path`, making what is missing; returns a descriptor. Raises OSError."""
    current = open_in(root, "/", os.O_PATH | os.O_DIRECTORY)
    done = PurePosixPath("/")
    for part in path.parts[1:]:
        done /= part
        try:
            below = open_in(root, str(done), os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            os.mkdir(part, 0o755, dir_fd=current)
            below = open_in(root, str(done), os.O_PATH | os.O_DIRECTORY)
            if owner is not None:
                os.chown(f"/proc/self/fd/{below}", owner, owner)
        finally:
            os.close(current)
        current = below
    return current
