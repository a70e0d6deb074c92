"""The command line of bubblewrap for one sandbox.

In: the folder that holds the sandbox's writable places, and what the installed bwrap can do. Out: an argument list.
The layout inside: the host's programs and a minimal /etc read-only, the writable places bound from one folder of
limited size, own /proc and /dev, loopback only, uid 1000 without capabilities.
"""

import os
from collections.abc import Sequence
from pathlib import Path

UID = 1000
USER = "user"
HOME = f"/home/{USER}"
WORK = "/work"
WRITABLE = (WORK, HOME, "/tmp", "/var/tmp", "/run", "/dev/shm")
"""Absolute paths inside; each is a folder of the same name below the sandbox's own folder."""
GRADE = "/grade"
"""Scratch folder of a check; never there while the agent runs."""
TESTS = "/tests"
"""Files for a check, read-only; never there while the agent runs."""

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ETC_FROM_HOST = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "ssl/certs",
    "ssl/openssl.cnf",
    "magic",
)
ETC_FILES = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\n"
    f"{USER}:x:{UID}:{UID}:{USER}:{HOME}:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"root:x:0:\n{USER}:x:{UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_KERNEL = ("--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/home", "--perms", "0755", "--dir", "/var")
_SEALED = ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir")
_READ_ALL = ("--cap-add", "CAP_DAC_READ_SEARCH")
USR_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def environment() -> dict[str, str]:
    """The whole environment of the shell; the same in every sandbox, so that runs can be repeated."""
    return {
        "PATH": PATH,
        "HOME": HOME,
        "USER": USER,
        "LOGNAME": USER,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
    }


def make_etc(folder: Path) -> None:
    """Fills `folder` with the /etc of every sandbox, with mount points for the host's parts."""
    folder.mkdir(mode=0o755)
    for name, text in ETC_FILES.items():
        (folder / name).write_text(text)
    for name in ETC_FROM_HOST:
        host = Path("/etc") / name
        (folder / name).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if host.is_dir():
            (folder / name).mkdir(mode=0o755)
        elif host.exists():
            (folder / name).touch(mode=0o644)


def make_places(folder: Path, uid: int | None) -> None:
    """The writable places below `folder`, owned by host user `uid` (None: by the caller)."""
    for place in WRITABLE:
        path = folder / place.lstrip("/")
        path.mkdir(mode=0o755, parents=True)
        if uid is not None:
            os.chown(path, uid, uid)
    for shared in ("tmp", "var/tmp", "dev/shm"):
        (folder / shared).chmod(0o1777)


def system_args(etc: Path) -> list[str]:
    """The read-only part that every sandbox shares."""
    args = ["--ro-bind", "/usr", "/usr"]
    for name in USR_LINKS:
        host = Path("/") / name
        if host.is_symlink():
            args += ["--symlink", str(host.readlink()), str(host)]
        elif host.is_dir():
            args += ["--ro-bind", str(host), str(host)]
    args += ["--ro-bind", str(etc), "/etc"]
    for name in ETC_FROM_HOST:
        if (etc / name).exists():
            args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return args


def agent_namespaces(no_nesting: bool) -> list[str]:
    """For the agent: every namespace, an unprivileged user, no capabilities, nothing of our environment."""
    args = ["--unshare-all", "--unshare-user", "--uid", str(UID), "--gid", str(UID)]
    args += ["--disable-userns"] if no_nesting else []
    return [*args, *_common(), "--cap-drop", "ALL"]


def check_namespaces(no_nesting: bool) -> list[str]:
    """For a check under the agent's host user: it may read what the agent made unreadable."""
    return [*agent_namespaces(no_nesting), *_READ_ALL]


def apart_check_namespaces() -> list[str]:
    """For a check under a host user of its own, root of a user namespace that the launcher made.

    Root inside it means no more than in `check_namespaces`.
    """
    kinds = ("ipc", "pid", "net", "uts", "cgroup-try")
    args = [f"--unshare-{kind}" for kind in kinds]
    return [*args, *_common(), "--cap-drop", "ALL", *_READ_ALL]


def _common() -> list[str]:
    args = ["--die-with-parent", "--new-session", "--hostname", "sandbox", "--clearenv"]
    for name, value in environment().items():
        args += ["--setenv", name, value]
    return args


def probe_args(system: Sequence[str], namespaces: Sequence[str]) -> list[str]:
    """The smallest machine that needs everything the others need."""
    return [*namespaces, *system, *_KERNEL, *_SEALED, "/"]


def shell_args(system: Sequence[str], namespaces: Sequence[str], files: Path) -> list[str]:
    """The machine of the agent's shell."""
    args = [*namespaces, *system, *_KERNEL]
    for place in WRITABLE:
        args += ["--bind", f"{files}{place}", place]
    return [*args, *_SEALED, "/"]  # an agent may have locked /work: the shell goes there itself


def check_args(system: Sequence[str], namespaces: Sequence[str], files: Path, grade: Path) -> list[str]:
    """The machine of a grader's program: the agent's places read-only, a scratch folder and tests of its own."""
    args = [*namespaces, *system, *_KERNEL]
    for place in WRITABLE:
        if place != "/dev/shm":
            args += ["--ro-bind", f"{files}{place}", place]
    args += ["--bind", f"{grade}/scratch", GRADE, "--ro-bind", f"{grade}/tests", TESTS]
    return [*args, "--setenv", "HOME", GRADE, "--setenv", "TMPDIR", GRADE, *_SEALED, WORK]


def limits_line(pids: int, memory_bytes: int) -> str:
    """Shell code that limits what follows where there is no control group.

    Processes are counted in the sandbox's own user namespace (Linux 5.14), so that limit is whole; memory is limited
    for each process only, by its private writable pages, which leaves programs that merely reserve addresses alone.
    """
    return f"ulimit -c 0; ulimit -u {pids}; ulimit -d {memory_bytes // 1024}"


def limited(argv: Sequence[str], pids: int, memory_bytes: int) -> list[str]:
    """`argv` started under `limits_line`."""
    return ["bash", "-c", f'{limits_line(pids, memory_bytes)}; exec -- "$@"', "bash", *argv]


def as_file(args: Sequence[str]) -> int:
    """A descriptor from which bwrap reads `args` (`--args`), so that the agent's `ps` does not show them."""
    fd = os.memfd_create("args")
    os.write(fd, b"".join(os.fsencode(arg) + b"\0" for arg in args))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
