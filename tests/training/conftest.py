"""Tiny models on disk, and samples for them."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

# before torch is imported: one thread that sleeps while it waits, also for exact comparisons
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

from claw_train.config import GuardConfig, MethodConfig, TrainerConfig
from claw_train.training.spec import TrainerSpec
from claw_train.types import Batch, Sample, Span, TurnId, Version

VOCAB = 97
BASE = Version("main", 0, 0)


def _config(architecture: str) -> PreTrainedConfig:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**sizes) if architecture == "llama" else Qwen3Config(**sizes)


def build_model(folder: Path, architecture: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(_config(architecture)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "other", "qwen3", seed=1)


SampleMaker = Callable[..., Sample]


@pytest.fixture(scope="session")
def sample() -> SampleMaker:
    """Makes a sample: `ids` with trained runs [start, end); one advantage and behaviour for all trained tokens."""

    def make(
        ids: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        advantage: float = 1.0,
        behaviour: float = -4.0,
        version: Version = BASE,
        temperature: float = 1.0,
    ) -> Sample:
        mask = [any(a <= i < b for a, b in spans) for i in range(len(ids))]
        return Sample(
            spans=tuple(Span(TurnId("s", "e", i), a, b) for i, (a, b) in enumerate(spans)),
            token_ids=tuple(ids),
            loss_mask=tuple(mask),
            behaviour_logprobs=tuple(behaviour * m for m in mask),
            versions=tuple(version if m else None for m in mask),
            advantages=tuple(advantage * m for m in mask),
            temperature=temperature,
            policy="main",
            group_id="g",
        )

    return make


@pytest.fixture(scope="session")
def samples(sample: SampleMaker) -> list[Sample]:
    """Two groups under one system prompt: different lengths, several spans, a branch after a shared reply, a repeat."""
    system = [5, 6, 7, 8, 9]
    one, two = [*system, 20, 21], [*system, 30]
    return [
        sample([*one, 40, 41, 42], [(7, 10)], advantage=1.0),
        sample([*one, 40, 41, 42], [(7, 10)], advantage=-0.5),
        sample([*one, 40, 41, 50, 51, 60, 61, 62], [(7, 9), (11, 14)], advantage=0.7),
        sample([*one, 40, 41, 50, 52, 63], [(7, 9), (11, 12)], advantage=-1.2, temperature=0.7),
        sample([*two, 70, 71], [(6, 8)], advantage=2.0),
        sample([*two, 72], [(6, 7)], advantage=0.0),
        sample([*two, 70, 71, 73, 74], [(6, 8), (9, 10)], advantage=-2.0, temperature=0.7),
    ]


@pytest.fixture(scope="session")
def batch_of() -> Callable[[Sequence[Sample], int], Batch]:
    def make(samples: Sequence[Sample], step: int = 1) -> Batch:
        return Batch(step=step, samples=tuple(samples), num_loss_tokens=sum(sum(s.loss_mask) for s in samples))

    return make


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., TrainerSpec]:
    """Makes a spec: keyword arguments go to the section that has them."""

    def make(model: Path, *, run_dir: Path | None = None, **keys: object) -> TrainerSpec:
        sections: dict[str, dict[str, object]] = {"trainer": {}, "method": {}, "guards": {}, "spec": {}}
        homes = {"trainer": TrainerConfig, "method": MethodConfig, "guards": GuardConfig, "spec": TrainerSpec}
        defaults = {
            "dtype": "float32",
            "lora_rank": 4,
            "lr": 1e-2,
            "outlier_logratio": 1e9,
            "mismatch_k3": 1e9,
            "weights_dtype": "float32",
        }
        for key, value in {**defaults, **keys}.items():
            home = next(n for n, kind in homes.items() if key in kind.__dataclass_fields__)
            sections[home][key] = value
        return TrainerSpec(
            model_path=str(model),
            run_dir=str(run_dir or tmp_path / "run"),
            trainer=TrainerConfig(**sections["trainer"]),  # type: ignore[arg-type]
            method=MethodConfig(**sections["method"]),  # type: ignore[arg-type]
            guards=GuardConfig(**sections["guards"]),  # type: ignore[arg-type]
            **sections["spec"],  # type: ignore[arg-type]
        )

    return make
