"""Where a model's weights and tokenizer come from.

In: a `ModelConfig`. Out: a `ModelFolder`. Ways, in order: the local path given; what an earlier run converted; the
Hugging Face cache; its hub; the GGUF in a PyPI wheel. A model with `random_init` is drawn instead. Imports no torch.
"""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from claw_train.children import thread_env
from claw_train.config import ModelConfig, conf_dir
from claw_train.errors import ConfigError, ModelError
from claw_train.models.cache import cache_dir, make_once
from claw_train.models.hub import TOKENIZER_FILES, hub_cached, hub_download, missing_part
from claw_train.models.wheel import wheel_file

logger = logging.getLogger(__name__)

_CONVERT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on the local disk."""

    name: str
    path: Path
    """Holds config.json and safetensors."""
    tokenizer_path: Path
    """Holds tokenizer.json and the chat template."""
    source: str
    """`path`, `converted`, `hub cache`, `hub`, `wheel` or `random`; for the run's manifest."""


def model_config(name: str) -> ModelConfig:
    """Reads `conf/model/NAME.yaml`.

    Raises:
        ConfigError: no such model.
    """
    from omegaconf import OmegaConf

    file = conf_dir() / "model" / f"{name}.yaml"
    if not file.is_file():
        names = sorted(path.stem for path in file.parent.glob("*.yaml"))
        raise ConfigError(f"model={name!r} is unknown: one of {', '.join(names)}")
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(file))
    found = OmegaConf.to_object(merged)
    assert isinstance(found, ModelConfig)
    return found


def find_model(config: ModelConfig) -> ModelFolder:
    """Finds, fetches or makes the weights; seconds when they are already here, minutes the first time.

    Raises:
        ModelError: no way led to them; lists every way with its answer.
        ConfigError: `config.tokenizer` names no model.
    """
    if config.path is not None:
        path = _local(config, weights=True)
        tokenizer = path if (path / "tokenizer.json").is_file() else find_tokenizer(config)
        return ModelFolder(name=config.name, path=path, tokenizer_path=tokenizer, source="path")
    if config.random_init is not None:
        path = _random(config)
        return ModelFolder(name=config.name, path=path, tokenizer_path=path, source="random")
    path, source = _first_way(config, weights=True)
    tokenizer = path if config.tokenizer is None else find_tokenizer(config)
    return ModelFolder(name=config.name, path=path, tokenizer_path=tokenizer, source=source)


def find_tokenizer(config: ModelConfig) -> Path:
    """The folder of the model's tokenizer and chat template; fetches no weights from the hub.

    Raises:
        ModelError: no way led to it.
        ConfigError: `config.tokenizer` names no model.
    """
    if config.path is not None and (Path(config.path) / "tokenizer.json").is_file():
        return Path(config.path)
    if config.tokenizer is not None:
        return find_tokenizer(model_config(config.tokenizer))
    if config.path is not None:
        return _local(config, weights=False)
    return _first_way(config, weights=False)[0]


def _local(config: ModelConfig, *, weights: bool) -> Path:
    assert config.path is not None
    path = Path(config.path).expanduser().absolute()
    lacks = missing_part(path, weights=weights)
    if lacks == "no tokenizer.json" and config.tokenizer is not None:
        lacks = None
    if lacks is not None:
        raise ModelError(f"model.path={config.path} is not a model folder: {lacks}")
    return path


def _first_way(config: ModelConfig, *, weights: bool) -> tuple[Path, str]:
    """Tries every way in order; returns the folder and the way's name."""
    for folder in _converted(config, weights=weights):
        if folder.is_dir():
            return _whole(folder, weights=weights), "converted"
    answers = ["(1) local path: none given, set model.path=FOLDER"]
    if config.hub_id is None:
        answers.append("(2) Hugging Face: the model has no hub_id")
    else:
        said: list[str] = []
        for source, look in (("hub cache", hub_cached), ("hub", hub_download)):
            try:
                return look(config.hub_id, weights=weights), source
            except ModelError as error:
                said.append(str(error))
        answers.append(f"(2) Hugging Face {config.hub_id}: {'; '.join(said)}")
    if config.wheel is None:
        answers.append("(3) PyPI wheel: none carries this model")
    else:
        try:
            return _from_wheel(config, weights=weights), "wheel"
        except ModelError as error:
            answers.append(f"(3) PyPI wheel {config.wheel}: {error}")
    what = "weights" if weights else "tokenizer"
    raise ModelError(f"model {config.name}: no way led to its {what}: {'; '.join(answers)}")


def _converted(config: ModelConfig, *, weights: bool) -> list[Path]:
    """Folders an earlier conversion may have left, best first; a whole model also serves as a tokenizer."""
    if config.wheel_sha256 is None:
        return []
    stem = f"{config.name}-{config.wheel_sha256[:12]}"
    whole = cache_dir() / "models" / stem
    return [whole] if weights else [whole, cache_dir() / "tokenizers" / stem]


def _from_wheel(config: ModelConfig, *, weights: bool) -> Path:
    if config.wheel is None or config.wheel_file is None or config.wheel_sha256 is None:
        raise ModelError("wheel, wheel_file and wheel_sha256 must be set together")
    gguf = wheel_file(config.wheel, config.wheel_file, config.wheel_sha256)
    what = "model" if weights else "tokenizer"
    need = config.num_params * 4 + 50_000_000 if weights else 50_000_000
    return make_once(
        _converted(config, weights=weights)[-1],
        lambda out, fd: _convert([what, "--gguf", str(gguf), "--out", str(out)], fd),
        need_bytes=need,
    )


def _random(config: ModelConfig) -> Path:
    settings = json.dumps(config.random_init, sort_keys=True)
    tokenizer = find_tokenizer(config)
    digest = hashlib.sha256(settings.encode())
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            digest.update((tokenizer / name).read_bytes())

    def fill(out: Path, fd: int) -> None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, out / name)
        _convert(["random", "--settings", settings, "--out", str(out)], fd)

    target = cache_dir() / "models" / f"{config.name}-{digest.hexdigest()[:12]}"
    return _whole(make_once(target, fill, need_bytes=config.num_params * 4 + 50_000_000), weights=True)


def _whole(folder: Path, *, weights: bool) -> Path:
    """A folder of our cache, unless somebody took a part of it away."""
    lacks = missing_part(folder, weights=weights)
    if lacks is not None:
        raise ModelError(f"{folder} is damaged ({lacks}): delete it and try again")
    return folder


def _convert(args: list[str], lock_fd: int) -> None:
    """Runs `models.convert`; it ends with us, and the lock is held until it has ended.

    Raises:
        ModelError: its last line.
    """
    logger.info("writing a model folder once (%s): this takes up to a minute", args[0])
    command = [sys.executable, "-m", "claw_train.models.convert", *args]
    env = thread_env(1)
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=_environ(env), pass_fds=(lock_fd,)
        )
        try:
            code = child.wait(_CONVERT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise ModelError(f"conversion took more than {_CONVERT_TIMEOUT_S:.0f} s") from None
        finally:
            child.kill()
            child.wait()
            assert child.stdin is not None
            child.stdin.close()
        if code != 0:
            log.seek(0)
            lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
            raise ModelError(f"conversion failed: {lines[-1].strip() if lines else f'exit code {code}'}")


def _environ(extra: dict[str, str]) -> dict[str, str]:
    # a conversion reads local files only; without this it would wait for the hub on a machine that has no network
    return {**os.environ, **extra, "HF_HUB_OFFLINE": "1"}
