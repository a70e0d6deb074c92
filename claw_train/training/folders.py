"""Folders of a run for checkpoints, weights and sockets: names, durable writing, finding, pruning. Imports no torch.

A folder is written as `.tmp-<name>`, its files and itself are fsynced, and one rename makes it exist; so a folder
with a proper name is whole. Lineages are counted in a file, so that a version never names two weights.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from claw_train.errors import ConfigError, TrainerError
from claw_train.types import Version

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
"""Of a checkpoint: step, version, identity of the model, and the sizes of the other files."""
_CHECKPOINT = re.compile(r"step-(\d{6,})")
_TMP = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    step: int
    version: Version
    path: Path
    metrics: Mapping[str, float]
    """Of the step that wrote it."""


def checkpoints_dir(run_dir: Path) -> Path:
    """Where checkpoints are."""
    return run_dir / "checkpoints"


def weights_dir(run_dir: Path) -> Path:
    """Where weights for the engine are."""
    return run_dir / "weights"


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step`."""
    return f"step-{step:06d}"


def list_checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Whole checkpoints, oldest first; anything half-written is passed over."""
    found: list[Checkpoint] = []
    with contextlib.suppress(FileNotFoundError):
        for path in checkpoints_dir(run_dir).iterdir():
            if _CHECKPOINT.fullmatch(path.name):
                with contextlib.suppress(ConfigError):
                    found.append(read_checkpoint(path))
    return sorted(found, key=lambda c: c.step)


def latest_checkpoint(run_dir: Path) -> Checkpoint | None:
    """The newest whole checkpoint of a run; None when there is none."""
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def read_checkpoint(path: Path) -> Checkpoint:
    """What a checkpoint folder says of itself.

    Raises:
        ConfigError: it is no whole checkpoint; names the file.
    """
    state = read_state(path)
    # checkpoints of the first format had no figures
    metrics: Mapping[str, float] = state.get("metrics", {})
    return Checkpoint(step=int(state["step"]), version=Version.parse(state["version"]), path=path, metrics=metrics)


def read_state(path: Path) -> dict[str, Any]:
    """The checked `state.json` of a checkpoint.

    Raises:
        ConfigError: missing, unreadable, or another file of the folder is missing or cut short.
    """
    file = path / STATE_FILE
    try:
        state: dict[str, Any] = json.loads(file.read_text())
        sizes: dict[str, int] = state["files"]
        Version.parse(state["version"])
        if missing := {"step", "over_limit", "identity"} - state.keys():
            raise KeyError(*sorted(missing))
        wrong = [name for name, size in sizes.items() if (path / name).stat().st_size != size]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not part of a whole checkpoint ({error}); choose another one") from None
    if wrong:
        raise ConfigError(f"{path / wrong[0]} has the wrong size; choose another checkpoint")
    return state


def next_lineage(run_dir: Path) -> int:
    """Takes the next unused lineage of a run: 0 the first time; durable before it returns.

    Raises:
        TrainerError: the counter could not be written or read.
    """
    folder = checkpoints_dir(run_dir)
    counter = folder / "lineage"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a lost counter must not give a name twice: published weights still carry theirs
        used = [version.lineage for version, _ in _weight_folders(run_dir)]
        lineage = max([int(counter.read_text())] if counter.exists() else [], default=-1)
        lineage = max([lineage, *used]) + 1
        tmp = folder / f"{_TMP}lineage"
        tmp.write_text(str(lineage))
        _fsync(tmp)
        tmp.replace(counter)
        _fsync(folder)
    except (OSError, ValueError) as error:
        raise TrainerError(f"lineage counter {counter}: {error}") from error
    return lineage


@contextmanager
def durable_folder(target: Path, before_rename: Callable[[], None], after_rename: Callable[[], None]) -> Iterator[Path]:
    """Yields a temporary folder that becomes `target` when the block ends without an error.

    Args:
        target: must not exist.
        before_rename: called when all is on disk but not yet named.
        after_rename: called when the name is on disk too.
    """
    parent = target.parent
    parent.mkdir(parents=True, exist_ok=True)
    tmp = parent / f"{_TMP}{target.name}"
    shutil.rmtree(tmp, ignore_errors=True)
    try:
        tmp.mkdir()
        yield tmp
        for file in sorted(tmp.rglob("*")):
            _fsync(file)
        _fsync(tmp)
        before_rename()
        tmp.rename(target)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    _fsync(parent)
    after_rename()


def clean(run_dir: Path) -> None:
    """Removes what an interrupted writer left behind."""
    for folder in (checkpoints_dir(run_dir), weights_dir(run_dir)):
        with contextlib.suppress(FileNotFoundError):
            for path in folder.iterdir():
                if path.name.startswith(_TMP):
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prune_checkpoints(run_dir: Path, *, keep: int, newest: int) -> None:
    """Removes checkpoints of steps after `newest`, which were rolled back, all but the last `keep` others, and what is
    no whole checkpoint though it has the name of one.
    """
    found = list_checkpoints(run_dir)
    old = [c for c in found if c.step <= newest][:-keep]
    for checkpoint in old + [c for c in found if c.step > newest]:
        _remove(checkpoint.path)
    whole = {c.path for c in found}
    for path in sorted(checkpoints_dir(run_dir).glob("*")):
        if _CHECKPOINT.fullmatch(path.name) and path not in whole:
            logger.warning("%s is damaged: removed", path)
            _remove(path)


def prune_weights(run_dir: Path, *, policy: str, keep: int) -> None:
    """Removes all weight folders of a policy but the `keep` newest by lineage and step.

    The engine loads a folder some time after it is reported: `keep` must cover all that may still wait for it.
    """
    folders = [(version, path) for version, path in _weight_folders(run_dir) if version.policy == policy]
    folders.sort(key=lambda item: (item[0].lineage, item[0].step))
    for _, path in folders[:-keep]:
        _remove(path)


def _weight_folders(run_dir: Path) -> list[tuple[Version, Path]]:
    found: list[tuple[Version, Path]] = []
    with contextlib.suppress(FileNotFoundError):
        for path in weights_dir(run_dir).iterdir():
            with contextlib.suppress(ValueError):
                found.append((Version.parse(path.name), path))
    return found


def private_folder(run_dir: Path, policy: str) -> Path:
    """Makes the folder for the sockets of a policy's ranks, empty and ours alone (mode 0700).

    It is in the temporary folder, because sockets have short names only, and its name follows from the run, so that
    what a killed run left behind is cleared by its next start. One process at a time owns a run.

    Raises:
        TrainerError: the name is taken by something that is not our folder, or the disk failed.
    """
    name = hashlib.sha256(f"{run_dir.resolve()}\0{policy}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"claw-{os.geteuid()}-{name}"
    try:
        with contextlib.suppress(FileNotFoundError):
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise TrainerError(f"{folder} belongs to somebody else: remove it, or set TMPDIR to another folder")
            shutil.rmtree(folder)
        # never through a name that somebody else made in between: mkdir refuses one that exists
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise TrainerError(f"folder {folder} for the trainer's sockets: {error}") from error
    return folder


def _remove(path: Path) -> None:
    """Renames first, so that a folder with a proper name is never half removed."""
    doomed = path.with_name(f"{_TMP}old-{path.name}")
    with contextlib.suppress(OSError):
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
