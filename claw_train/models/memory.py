"""How much memory a run needs, by part, told before anything loads.

In: model, engine and trainer settings. Out: bytes by part, or one line that says what would fit. Estimates: within a
fifth of what was measured for SmolLM2-135M, rounded up where unsure. Loads nothing.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from claw_train.config import EngineConfig, ModelConfig, TrainerConfig, conf_dir
from claw_train.errors import ConfigError

EMBEDDED_ARCHITECTURES = ("llama", "qwen3")
_PROCESS = 450_000_000
"""Of a Python process with torch and transformers imported, before it holds a tensor."""
_GPU_TIMEOUT_S = 5.0
_MAIN_PROCESS = 200_000_000
_BYTES = {"bfloat16": 2, "float32": 4}
_ACTIVATION_BYTES = {"bfloat16": 82, "float32": 150}
"""Per packed token, layer and hidden unit, kept for the backward pass; measured."""
_LORA_SHARE = 1.35
"""Adapter parameters over model parameters is about this times rank over hidden size, all linear layers adapted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes by part; all parts are held at once."""

    engine_weights: int
    engine_cache: int
    trainer_weights: int
    trainer_optimizer: int
    """Gradients and moments of what is trained."""
    trainer_activations: int
    processes: int
    """Interpreters and libraries."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Name -> bytes."""
        return {
            "engine weights": self.engine_weights,
            "engine cache": self.engine_cache,
            "trainer weights": self.trainer_weights,
            "optimizer": self.trainer_optimizer,
            "activations": self.trainer_activations,
            "processes": self.processes,
        }


def memory_needed(model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig) -> MemoryNeed:
    """Estimates a run on this machine; an engine given by url needs nothing here."""
    n = model.num_params
    local = engine.kind == "embedded"
    served = _BYTES[engine.dtype]
    embeddings = model.vocab_size * model.hidden_size
    if trainer.kind == "full":
        trained = n - (embeddings if trainer.freeze_embeddings else 0)
        optimizer = 12 * trained
        # float32 masters, the reference, and autocast's copy of the masters
        weights = 4 * n + _BYTES[trainer.dtype] * n + (2 * n if trainer.dtype == "bfloat16" else 0)
    else:
        share = _LORA_SHARE * trainer.lora_rank / model.hidden_size if model.hidden_size else 0.0
        optimizer = int(16 * n * min(1.0, share))
        # the output matrix is kept in float32
        weights = _BYTES[trainer.dtype] * n + (4 * embeddings if trainer.dtype == "bfloat16" else 0)
    per_token = model.layers * model.hidden_size * _ACTIVATION_BYTES[trainer.dtype]
    return MemoryNeed(
        engine_weights=n * served if local else 0,
        engine_cache=engine.max_total_tokens * model.kv_bytes_per_token * served // 2 if local else 0,
        trainer_weights=weights * trainer.num_ranks,
        trainer_optimizer=optimizer * trainer.num_ranks,
        trainer_activations=per_token * trainer.tokens_per_micro_batch * trainer.num_ranks,
        processes=_MAIN_PROCESS + _PROCESS * (trainer.num_ranks + (1 if local else 0)),
    )


def machine_memory() -> int:
    """Bytes a run may use: of the GPUs where they hold more than the machine, else of the machine or control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return max(total, _gpu_memory())


def _gpu_memory() -> int:
    """Bytes of all NVIDIA GPUs; 0 without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S, check=True).stdout
        return sum(int(line) for line in listed.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0


def check_fits(
    model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig, *, available_bytes: int | None = None
) -> MemoryNeed:
    """Refuses a run that this machine cannot hold, or whose model the embedded engine does not know; loads nothing.

    Args:
        model: with `num_params` 0 nothing is known and nothing refused.
        engine: its type, cache and kind.
        trainer: its kind, rank and batch.
        available_bytes: of memory; None asks the machine.

    Raises:
        ConfigError: one line with what is needed, what there is, and what would fit.
    """
    need = memory_needed(model, engine, trainer)
    have = machine_memory() if available_bytes is None else available_bytes
    if model.num_params and need.total > have:
        biggest = sorted(need.parts().items(), key=lambda part: -part[1])[:3]
        listed = ", ".join(f"{name} {_gib(size)}" for name, size in biggest)
        raise ConfigError(
            f"model={model.name} needs {_gib(need.total)} ({listed}), this machine has {_gib(have)}: "
            f"{_advice(model, engine, trainer, have)}"
        )
    if engine.kind == "embedded" and not _embedded(model):
        raise ConfigError(
            f"model={model.name}: the embedded engine does not run {model.architecture}; "
            "start an SGLang server and give engine=url engine.url=http://HOST:PORT"
        )
    return need


def _embedded(model: ModelConfig) -> bool:
    return model.architecture in EMBEDDED_ARCHITECTURES and not model.vision


def _advice(model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig, have: int) -> str:
    """The mildest change that fits."""
    for kind in dict.fromkeys((trainer.kind, "lora")):
        for rows, tokens in ((None, None), (1024, None), (1024, 8192)):
            less = replace(trainer, kind=kind, tokens_per_micro_batch=rows or trainer.tokens_per_micro_batch)
            small = replace(engine, max_total_tokens=min(tokens or engine.max_total_tokens, engine.max_total_tokens))
            if memory_needed(model, small, less).total <= have:
                changes = [f"trainer.kind={kind}"] if kind != trainer.kind else []
                changes += [f"trainer.tokens_per_micro_batch={rows}"] if rows else []
                changes += [f"engine.max_total_tokens={small.max_total_tokens}"] if tokens else []
                return f"{' '.join(changes)} fits"
    fitting = [row for row in what_fits(have) if row.lora]
    if not fitting:
        return "no known model fits"
    return f"model={max(fitting, key=lambda row: row.num_params).model} fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one model needs on a CPU with default settings, and whether it may run here."""

    model: str
    num_params: int
    lora_bytes: int
    full_bytes: int
    lora: bool
    """Training with LoRA fits."""
    full: bool
    """Training all weights fits."""
    embedded: bool
    """The embedded engine runs its architecture; others need a server given by engine.url."""


def what_fits(available_bytes: int | None = None, models: Sequence[ModelConfig] | None = None) -> list[Fit]:
    """One row for each model in `conf/model`, smallest first; for `claw doctor` and for advice."""
    from claw_train.models.find import model_config

    have = machine_memory() if available_bytes is None else available_bytes
    known = models or [model_config(file.stem) for file in sorted((conf_dir() / "model").glob("*.yaml"))]
    rows: list[Fit] = []
    for model in sorted((m for m in known if m.num_params), key=lambda m: m.num_params):
        tokens = min(EngineConfig().max_total_tokens, 4 * model.context)
        engine = EngineConfig(max_total_tokens=tokens)
        lora = memory_needed(model, engine, TrainerConfig(kind="lora")).total
        full = memory_needed(model, engine, TrainerConfig(kind="full")).total
        embedded = _embedded(model)
        rows.append(
            Fit(
                model=model.name,
                num_params=model.num_params,
                lora_bytes=lora,
                full_bytes=full,
                lora=embedded and lora <= have,
                full=embedded and full <= have,
                embedded=embedded,
            )
        )
    return rows


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
