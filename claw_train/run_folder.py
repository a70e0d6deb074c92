"""The run folder: where everything about a run lies, and how files get there whole.

RUN/
  manifest.json   who, what, when: command, commit, versions, seed, model and tokenizer hashes
  config.yaml     the resolved configuration; `claw-train resume=RUN` reads it
  ledger.sqlite   every turn and its fate        records/      the same, readable, one file a weight version
  metrics.jsonl   one line a step                tensorboard/  the same as event files
  checkpoints/    weights/                       logs/         one file a child process
  eval/           finished evaluations           curve.png     summary.json and replies.md: written at the end

Prompts and replies are in many of them, so a new folder is its owner's alone (0700), and so is every file (0600).
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from claw_train.config import TrainConfig, to_config
from claw_train.errors import ConfigError, DiskError

_PACKAGES = ("claw-rl", "torch", "transformers", "accelerate", "peft", "tokenizers", "gymnasium", "numpy")

_FIXED_EVAL = ("tasks", "heldout_tasks")


class RunFolder:
    """Paths of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()

    @property
    def config(self) -> Path:
        """Resolved configuration."""
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        """One log a child."""
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """Written when training has ended."""
        return self.path / "summary.json"

    @classmethod
    def create(cls, config: TrainConfig) -> "RunFolder":
        """Makes the folder of a new run and writes its configuration.

        Raises:
            ConfigError: it holds a run already.
            DiskError: it cannot be written.
        """
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{'-'.join(s.name for s in config.streams)}-{config.model.name}"
        folder = cls(Path(config.run_dir) if config.run_dir else Path("runs") / name)
        if folder.config.exists():
            raise ConfigError(f"run_dir={folder.path} holds a run: continue it with resume={folder.path}")
        with disk_errors(folder.path):
            folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.logs.mkdir(mode=0o700, exist_ok=True)
        try:
            write_bytes(folder.config, _to_yaml(config).encode(), exclusive=True)
        except FileExistsError:  # another process was quicker
            raise ConfigError(f"run_dir={folder.path} holds a run: continue it with resume={folder.path}") from None
        return folder

    @classmethod
    def reopen(cls, path: Path, overrides: Mapping[str, Any]) -> tuple["RunFolder", TrainConfig]:
        """An existing run and its configuration, with `overrides` (section -> key -> value) on top.

        Raises:
            ConfigError: there is no run, its configuration is unreadable, or `overrides` change the tasks of its
                evaluations, which are compared with one another.
        """
        import yaml
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"resume={path}: no run there (config.yaml is missing)")
        try:
            stored = OmegaConf.load(folder.config)
            rows = [OmegaConf.to_container(c) for c in (stored, OmegaConf.merge(stored, dict(overrides)))]
        except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError) as error:
            raise ConfigError(f"{folder.config} is unreadable: {error}") from None
        plain = [{str(k): v for k, v in row.items()} for row in rows if isinstance(row, dict)]
        if len(plain) != len(rows):
            raise ConfigError(f"{folder.config} is not a configuration")
        before, after = (to_config(row) for row in plain)
        for name in _FIXED_EVAL:
            old, new = getattr(before.eval, name), getattr(after.eval, name)
            if new != old:
                raise ConfigError(
                    f"eval.{name}={new}: the run began with eval.{name}={old}, and its evaluations before and after "
                    "are compared task by task; start a new run to change it"
                )
        return folder, after

    def write_config(self, config: TrainConfig) -> None:
        """Makes `config` the one that a later resume goes on with.

        Raises:
            DiskError: it cannot be written; the earlier one stays.
        """
        write_text(self.config, _to_yaml(config))

    def abandon(self) -> None:
        """Takes back a run that never began, so that the same command can be given again; the logs stay."""
        for name in ("config.yaml", "manifest.json", "metrics.jsonl", "lock"):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("ledger.sqlite*"):
            file.unlink()
        for name in ("checkpoints", "weights", "tensorboard", "records"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def write_manifest(self, extra: Mapping[str, Any]) -> None:
        """Records what this run depends on; on resume the first manifest stays and `resumes` grows by one.

        Raises:
            DiskError: it cannot be written.
        """
        file = self.path / "manifest.json"
        now = {
            "command": " ".join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": git_commit(),
        }
        manifest = _read_manifest(file)
        if manifest is None:
            manifest = {
                **now,
                "python": platform.python_version(),
                "platform": platform.platform(),
                "processor": processor(),
                "packages": {name: _version(name) for name in _PACKAGES},
                **extra,
                "resumes": [],
            }
        else:
            resumed = {**now, "first_step": extra.get("first_step")}
            manifest["resumes"] = [*manifest.get("resumes", []), resumed]
        write_text(file, json.dumps(manifest, indent=2) + "\n")


def _read_manifest(file: Path) -> dict[str, Any] | None:
    """What is there; None when nothing readable is."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a failure of the disk while `path` is written into a `DiskError` of one line."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror or error}") from error


def open_private(path: Path, mode: str) -> IO[bytes]:
    """Opens a binary file; one that it makes is readable by its owner only.

    Raises:
        DiskError: it cannot be opened.
    """
    with disk_errors(path):
        return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_bytes(path: Path, data: bytes, *, exclusive: bool = False) -> None:
    """Writes a whole file or none, readable by its owner only: temporary file, fsync, rename.

    Raises:
        DiskError: it cannot be written; what was there stays.
        FileExistsError: `exclusive`, and it is there already.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with disk_errors(path):
        try:
            with open_private(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if not exclusive:
                temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    if exclusive:
        try:
            os.link(temporary, path)
        finally:
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8."""
    write_bytes(path, text.encode())


def _to_yaml(config: TrainConfig) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def git_commit() -> str | None:
    """Commit of the checkout this code runs from, with `-dirty` when it has changes; None outside one."""
    here = Path(__file__).resolve().parent
    try:
        run = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() or None


def processor() -> str:
    """Model name of the processor and the number of cores."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
