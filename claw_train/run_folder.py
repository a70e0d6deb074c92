"""The run folder: where everything about a run lies, and how files get there whole.

RUN/
  manifest.json   who, what, when: command, commit, versions, seed, model and tokenizer hashes
  config.yaml     the resolved configuration; `claw-train resume=RUN` reads it
  ledger.sqlite   every turn and its fate        records/      the same, readable, one file a weight version
  metrics.jsonl   one line a step                tensorboard/  the same as event files
  checkpoints/    weights/                       logs/         one file a child process
  curve.png       summary.json                   replies.md    written at the end
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from claw_train.config import TrainConfig, to_config
from claw_train.errors import ConfigError, DiskError

_PACKAGES = ("claw-rl", "torch", "transformers", "accelerate", "peft", "tokenizers", "gymnasium", "numpy")


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
        try:
            folder.logs.mkdir(parents=True, exist_ok=True)
            write_text(folder.config, _to_yaml(config))
        except OSError as error:
            raise DiskError(f"run folder {folder.path} cannot be written: {error.strerror}") from error
        return folder

    @classmethod
    def reopen(cls, path: Path, overrides: Mapping[str, Any]) -> tuple["RunFolder", TrainConfig]:
        """An existing run and its configuration, with `overrides` (section -> key -> value) on top.

        Raises:
            ConfigError: there is no run, or its configuration is unreadable.
        """
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        folder = cls(path)
        if not folder.config.is_file():
            raise ConfigError(f"resume={path}: no run there (config.yaml is missing)")
        try:
            raw = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(folder.config), dict(overrides)))
        except (OmegaConfBaseException, OSError, ValueError) as error:
            raise ConfigError(f"{folder.config} is unreadable: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{folder.config} is not a configuration")
        return folder, to_config({str(k): v for k, v in raw.items()})

    def abandon(self) -> None:
        """Takes back a run that never began, so that the same command can be given again; the logs stay."""
        for name in ("config.yaml", "manifest.json", "metrics.jsonl", "lock"):
            (self.path / name).unlink(missing_ok=True)
        for file in self.path.glob("ledger.sqlite*"):
            file.unlink()
        for name in ("checkpoints", "weights", "tensorboard", "records"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def write_manifest(self, extra: Mapping[str, Any]) -> None:
        """Records what this run depends on."""
        manifest = {
            "command": " ".join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "commit": git_commit(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "processor": processor(),
            "packages": {name: _version(name) for name in _PACKAGES},
            **extra,
        }
        write_text(self.path / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or none: temporary file, fsync, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


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
