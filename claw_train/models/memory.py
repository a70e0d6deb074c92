"""How much memory a run needs, by part, told before anything loads.

In: model, engine and trainer settings. Out: bytes by part, or one line that says what would fit. Estimates: within a
fifth of what was measured for SmolLM2-135M, rounded up where unsure. Loads nothing.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from claw_train.config import EngineConfig, ModelConfig, TrainerConfig, conf_dir
from claw_train.errors import ConfigError

_PROCESS = 450_000_000
"""Of a Python process with torch and transformers imported, before it holds a tensor."""
_MAIN_PROCESS = 200_000_000
_ACTIVATION_BYTES = 76
"""Per token, layer and hidden unit, kept for the backward pass under bf16 autocast."""
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
    value = 2 if engine.dtype == "bfloat16" else 4
    local = engine.kind == "embedded"
    if trainer.kind == "full":
        optimizer = 12 * n
    else:
        share = _LORA_SHARE * trainer.lora_rank / model.hidden_size if model.hidden_size else 0.0
        optimizer = int(16 * n * min(1.0, share))
    activations = model.layers * model.hidden_size * _ACTIVATION_BYTES
    logits = model.vocab_size * 4 * 3
    # with bf16 autocast a second copy of the weights lives beside the float32 masters
    weights = n * (6 if trainer.dtype == "bfloat16" else 4)
    # packed rows share prompts and pay for logits only where the loss is: half of the tokens at most
    per_token = activations + logits // 2
    return MemoryNeed(
        engine_weights=n * value if local else 0,
        engine_cache=engine.max_total_tokens * model.kv_bytes_per_token * value // 2 if local else 0,
        trainer_weights=weights * trainer.num_ranks,
        trainer_optimizer=optimizer * trainer.num_ranks,
        trainer_activations=per_token * trainer.tokens_per_micro_batch * trainer.num_ranks,
        processes=_MAIN_PROCESS + _PROCESS * (trainer.num_ranks + (1 if local else 0)),
    )


def machine_memory() -> int:
    """Bytes this process tree may use: of the machine, or of its control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return total


def check_fits(
    model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig, *, available_bytes: int | None = None
) -> MemoryNeed:
    """Refuses a run that this machine cannot hold; loads nothing.

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
    if model.num_params == 0 or need.total <= have:
        return need
    biggest = sorted(need.parts().items(), key=lambda part: -part[1])[:3]
    listed = ", ".join(f"{name} {_gib(size)}" for name, size in biggest)
    raise ConfigError(
        f"model={model.name} needs {_gib(need.total)} ({listed}), this machine has {_gib(have)}: "
        f"{_advice(model, engine, trainer, have)}"
    )


def _advice(model: ModelConfig, engine: EngineConfig, trainer: TrainerConfig, have: int) -> str:
    lora = replace(trainer, kind="lora")
    if trainer.kind == "full" and memory_needed(model, engine, lora).total <= have:
        return "trainer.kind=lora fits"
    small = replace(engine, max_total_tokens=max(model.context, 1))
    less = replace(lora, tokens_per_micro_batch=1024)
    if small.max_total_tokens < engine.max_total_tokens and memory_needed(model, small, less).total <= have:
        return f"engine.max_total_tokens={small.max_total_tokens} with trainer.tokens_per_micro_batch=1024 fits"
    rows = [row for row in what_fits(have) if row.lora and row.model != model.name]
    if not rows:
        return "no known model fits"
    return f"model={max(rows, key=lambda row: row.num_params).model} fits"


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
        embedded = model.architecture in ("llama", "qwen3") and not model.vision
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
