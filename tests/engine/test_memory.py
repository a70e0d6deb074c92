"""What the models' descriptions say, what a run needs, and what is advised when it does not fit."""

import os

import pytest

from claw_train.config import EngineConfig, ModelConfig, TrainerConfig, conf_dir
from claw_train.errors import ConfigError
from claw_train.models import check_fits, memory_needed, model_config, what_fits
from claw_train.models import memory as memory_module

NAMES = sorted(path.stem for path in (conf_dir() / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_every_description_is_complete(name):
    config = model_config(name)
    assert config.name == name
    assert config.hub_id or config.random_init
    assert min(config.num_params, config.layers, config.hidden_size, config.vocab_size, config.kv_bytes_per_token) > 0
    assert config.lora_targets


def test_the_papers_models_are_described():
    assert {"qwen3-4b-thinking", "qwen3-8b", "qwen3-32b", "qwen3-4b", "qwen3vl-8b-thinking", "qwen3vl-4b"} <= set(NAMES)


def test_the_estimate_is_near_what_the_trainer_used():
    """Peak resident memory of a LoRA step on one row of 1,848 tokens, bf16: 3.56 GB; float32: 5.90; full bf16: 5.33."""
    model = model_config("smollm2-135m")
    for kind, dtype, measured in (("lora", "bfloat16", 3.56), ("lora", "float32", 5.90), ("full", "bfloat16", 5.33)):
        trainer = TrainerConfig(kind=kind, dtype=dtype, tokens_per_micro_batch=1848)
        need = memory_needed(model, EngineConfig(kind="scripted"), trainer)
        trainer_alone = need.total - memory_module._MAIN_PROCESS
        assert trainer_alone / 1e9 == pytest.approx(measured, rel=0.2)


GIB = 2**30


def test_what_does_not_fit_is_told_with_figures_and_a_way_out():
    with pytest.raises(ConfigError) as caught:
        check_fits(model_config("qwen3-32b"), EngineConfig(), TrainerConfig(), available_bytes=24 * GIB)
    message = str(caught.value)
    assert "\n" not in message
    assert "needs 246.5 GiB" in message
    assert "this machine has 24.0 GiB: model=smollm2-135m fits" in message


@pytest.mark.parametrize(
    ("kind", "gib", "advice"),
    [
        ("full", 9, "trainer.tokens_per_micro_batch=1024 fits"),
        ("full", 4.6, "trainer.kind=lora trainer.tokens_per_micro_batch=1024 fits"),
        ("lora", 6, "trainer.tokens_per_micro_batch=1024 fits"),
        ("lora", 4, "trainer.tokens_per_micro_batch=1024 engine.max_total_tokens=8192 fits"),
        ("lora", 1.5, "model=tiny fits"),
        ("lora", 0.5, "no known model fits"),
    ],
)
def test_the_advice_holds(kind, gib, advice):
    model, trainer = model_config("smollm2-135m"), TrainerConfig(kind=kind)
    with pytest.raises(ConfigError, match=f": {advice}$"):
        check_fits(model, EngineConfig(), trainer, available_bytes=int(gib * GIB))


def test_a_model_for_sglang_is_refused_by_the_embedded_engine():
    model = model_config("qwen3vl-4b")
    with pytest.raises(ConfigError, match=r"engine=url engine\.url="):
        check_fits(model, EngineConfig(), TrainerConfig(), available_bytes=1 << 50)


def test_an_unknown_size_refuses_nothing():
    check_fits(ModelConfig(name="mine"), EngineConfig(), TrainerConfig(), available_bytes=1)


def test_an_engine_elsewhere_needs_nothing_here():
    model = model_config("qwen3-8b")
    elsewhere = EngineConfig(kind="url", url="http://gpu:30000")
    need = memory_needed(model, elsewhere, TrainerConfig())
    assert need.engine_weights == need.engine_cache == 0


def test_rows_for_the_doctor_go_from_small_to_large():
    rows = what_fits(24 * GIB)
    assert [row.num_params for row in rows] == sorted(row.num_params for row in rows)
    assert {row.model for row in rows if row.lora} == {"tiny", "smollm2-135m"}
    assert all(row.lora_bytes > 0 and row.full_bytes > 0 for row in rows)


def test_gpu_memory_counts_where_it_is_larger(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1000000\\n2000000\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert memory_module.machine_memory() == 3_000_000 * 2**20
