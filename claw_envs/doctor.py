"""What this machine can run: the rows behind `claw doctor`.

In: the machine and the installed distribution. Out: sections of `Check` rows, each with the fix for what is missing.
Other packages add sections through the entry point group `claw.doctor` (name: the section's title; object: a function
that returns rows). Quick, and imports no sandbox client, browser or model library; knows nothing of training.
"""

import dataclasses
import http.client
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "claw-rl"
_TIMEOUT_S = 1.5


class Status(StrEnum):
    """What a row says."""

    OK = "ok"
    LIMITED = "limited"
    """Works, with less than it could."""
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    """What to do, if anything can be done; empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Rows under one title."""

    title: str
    checks: tuple[Check, ...]


def examine() -> list[Section]:
    """Every section, ours first."""
    own: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("machine", machine),
        ("sandboxes", sandboxes),
        ("extras", extras),
    ]
    found = [Section(title=title, checks=tuple(look())) for title, look in own]
    return found + [_plugged_in(point) for point in sorted(metadata.entry_points(group="claw.doctor"))]


def _plugged_in(point: metadata.EntryPoint) -> Section:
    try:
        checks = tuple(point.load()())
    except ImportError as error:
        fix = f"pip install '{DISTRIBUTION}[train]'"
        checks = (Check(name=point.name, status=Status.MISSING, detail=f"cannot look: {error}", fix=fix),)
    return Section(title=point.name, checks=checks)


def machine() -> list[Check]:
    """Interpreter, processor, memory, GPU and disk."""
    return [_python(), _platform(), _cores(), _memory(), _gpu(), *_disks()]


def _python() -> Check:
    enough = sys.version_info >= (3, 11)
    return Check(
        name="python",
        status=Status.OK if enough else Status.MISSING,
        detail=f"{platform.python_version()} in {sys.prefix}",
        fix="" if enough else "install Python 3.11 or newer",
    )


def _platform() -> Check:
    linux = sys.platform == "linux"
    return Check(
        name="platform",
        status=Status.OK if linux else Status.LIMITED,
        detail=f"{platform.system()} {platform.release()} {platform.machine()}",
        fix="" if linux else "sandboxes need Linux, or a Docker engine",
    )


def _cores() -> Check:
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check(name="cores", status=Status.OK if n >= 2 else Status.LIMITED, detail=str(n))


def _memory() -> Check:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return Check(name="memory", status=Status.LIMITED, detail="unknown")
    return Check(name="memory", status=Status.OK, detail=f"{gib(total)}, {gib(free)} free")


def _gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    listed = _output([tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]) if tool else None
    if not listed:
        detail = "no NVIDIA driver" if tool is None else "the NVIDIA driver lists none"
        return Check(name="gpu", status=Status.LIMITED, detail=f"{detail}: models run on the processor")
    return Check(name="gpu", status=Status.OK, detail="; ".join(listed.splitlines()))


def _disks() -> list[Check]:
    return [disk("disk here", Path.cwd()), disk("disk for sandboxes", Path(tempfile.gettempdir()))]


def disk(name: str, folder: Path, need_bytes: int = 2 * 2**30) -> Check:
    """Free space under `folder`, which need not exist yet; less than `need_bytes` is `LIMITED`."""
    there = next((p for p in (folder, *folder.parents) if p.is_dir()), Path("/"))
    free = shutil.disk_usage(there).free
    little = free < need_bytes
    return Check(
        name=name,
        status=Status.LIMITED if little else Status.OK,
        detail=f"{gib(free)} free in {folder}",
        fix=f"free up to {gib(need_bytes)}" if little else "",
    )


def sandboxes() -> list[Check]:
    """Which backends can isolate an agent here."""
    return [_namespace(), _docker()]


def _namespace() -> Check:
    from claw_envs.sandbox.factory import Backend, probe

    name = Backend.NAMESPACE.value
    found = probe()[name]
    if found.capabilities is None:
        fix = "" if shutil.which("bwrap") else "scripts/system-packages, or your package manager"
        return Check(name=name, status=Status.MISSING, detail=found.detail, fix=fix)
    lacking = [limit for limit, held in dataclasses.asdict(found.capabilities).items() if not held]
    if lacking:
        detail = f"{found.detail}; not enforced: {', '.join(lacking)}"
        fix = "run as root, or delegate the memory and pids control groups to your user"
        return Check(name=name, status=Status.LIMITED, detail=detail, fix=fix)
    return Check(name=name, status=Status.OK, detail=found.detail)


def _docker() -> Check:
    name = "docker"
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not address.startswith("unix://"):
        return Check(name=name, status=Status.LIMITED, detail=f"not asked: {address} is no local socket")
    path = address.removeprefix("unix://")
    try:
        answer = _ask_unix(path, "/_ping")
    except FileNotFoundError:
        fix = "install and start a Docker engine, if you want that backend"
        return Check(name=name, status=Status.MISSING, detail=f"no engine at {path}", fix=fix)
    except PermissionError:
        fix = "join the group that owns the socket"
        return Check(name=name, status=Status.MISSING, detail=f"no access to {path}", fix=fix)
    except (OSError, http.client.HTTPException) as error:
        return Check(name=name, status=Status.MISSING, detail=f"{path}: {error}", fix="start the Docker engine")
    return Check(name=name, status=Status.OK, detail=f"engine API {answer} at {path}")


def _ask_unix(path: str, target: str) -> str:
    """The API version that the engine behind the socket `path` gives. Raises OSError or HTTPException."""
    connection = http.client.HTTPConnection("localhost", timeout=_TIMEOUT_S)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as plain:
        plain.settimeout(_TIMEOUT_S)
        plain.connect(path)
        connection.sock = plain
        connection.request("GET", target)
        return connection.getresponse().getheader("Api-Version", "unknown")


def extras() -> list[Check]:
    """One row for each extra of the distribution, with what it lacks."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        fix = "pip install -e . in the checkout"
        return [Check(name=DISTRIBUTION, status=Status.MISSING, detail="runs from a bare checkout", fix=fix)]
    return [_extra(name, sorted(wanted)) for name, wanted in sorted(wanted_by_extra(requirements).items())]


def wanted_by_extra(requirements: Iterable[str]) -> dict[str, set[str]]:
    """Extra -> distributions it asks for; `all`, which gathers the others, is left out."""
    wanted: dict[str, set[str]] = defaultdict(set)
    for requirement in requirements:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)['\"]", requirement)
        if name and extra and extra.group(1) != "all":
            wanted[extra.group(1)].add(name.group())
    return dict(wanted)


def _extra(name: str, wanted: list[str]) -> Check:
    missing = [dist for dist in wanted if not _is_installed(dist)]
    if not missing:
        return Check(name=name, status=Status.OK, detail=f"{len(wanted)} packages")
    fix = f"pip install '{DISTRIBUTION}[{name}]'"
    return Check(name=name, status=Status.MISSING, detail=f"without {', '.join(missing)}", fix=fix)


def _is_installed(dist: str) -> bool:
    try:
        metadata.version(dist)
    except metadata.PackageNotFoundError:
        return False
    return True


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"


def _output(argv: list[str]) -> str | None:
    """What a program says; None when it fails, is absent or takes too long."""
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
