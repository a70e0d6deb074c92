"""Checks before a run: what an environment or a limit would break later is one line now."""

from pathlib import Path

import pytest

from claw_train import preflight
from claw_train.config import (
    EngineConfig,
    MethodConfig,
    ModelConfig,
    SamplingConfig,
    StreamConfig,
    TrainConfig,
    TrainerConfig,
)
from claw_train.errors import ConfigError
from claw_train.models import ModelFolder
from claw_train.preflight import Preflight


class SpelledTemplate:
    """One id a character of the opening messages."""

    def __init__(self, path, *, thinking):
        self.path, self.thinking = path, thinking

    def start(self, messages):
        return tuple(ord(c) for m in messages for c in m["content"])


@pytest.fixture
def check(monkeypatch):
    """`Preflight.check` of a stream without weights and with one token a character."""
    folder = ModelFolder(name="none", path=Path("weights"), tokenizer_path=Path("tokenizer"), source="test")
    monkeypatch.setattr(preflight, "find_model", lambda config: folder)
    monkeypatch.setattr(preflight, "TemplateRenderer", SpelledTemplate)

    def run(
        env_id="tests.helpers.toy_env:Toy-v0",
        *,
        deadline_s=30.0,
        context=4096,
        max_total_tokens=4096,
        max_new_tokens=8,
        **kwargs,
    ):
        stream = StreamConfig(name="toy", id=env_id, kwargs=kwargs, deadline_s=deadline_s)
        return Preflight.check(
            TrainConfig(
                model=ModelConfig(name="none", context=context),
                streams=[stream],
                engine=EngineConfig(kind="scripted", max_total_tokens=max_total_tokens),
                judge={"_target_": "claw_train.judging.rules.RulesJudge"},
                method=MethodConfig(),
                trainer=TrainerConfig(),
                sampling=SamplingConfig(max_new_tokens=max_new_tokens),
            )
        )

    return run


def test_a_stream_that_can_begin_passes(check):
    assert check().model.source == "test"


@pytest.mark.parametrize("where", ["init", "reset"])
def test_an_environment_that_raises_names_its_stream_and_nothing_else_is_said(check, where, caplog):
    with pytest.raises(ConfigError, match=r"streams\.toy: .*KeyError.*the kitchen is closed"):
        check(raise_on=where)
    assert caplog.text == ""


def test_an_environment_that_does_not_answer_names_its_stream(check):
    from tests.helpers.toy_env import HANGING

    HANGING.clear()
    try:
        with pytest.raises(ConfigError, match=r"streams\.toy: .*no answer to reset in 0\.05 s"):
            check(hang_on="reset", deadline_s=0.05)
    finally:
        HANGING.set()


TOO_LONG = r"streams\.toy\.kwargs\.timeout_s={} is not below streams\.toy\.deadline_s={}:"


def test_a_command_may_not_take_longer_than_a_step(check):
    with pytest.raises(ConfigError, match=TOO_LONG.format(120, 120)):
        check("ClawTerminal-v0", deadline_s=120.0, timeout_s=120)


@pytest.mark.sandbox
def test_the_environments_own_limit_of_a_command_counts_too(check):
    with pytest.raises(ConfigError, match=TOO_LONG.format(10, 9)):
        check("ClawTerminal-v0", deadline_s=9.0)


@pytest.mark.parametrize(
    ("limits", "key"),
    [
        ({"context": 256, "max_new_tokens": 250}, r"model\.context=256"),
        ({"max_total_tokens": 40, "max_new_tokens": 39}, r"engine\.max_total_tokens=40"),
    ],
)
def test_the_first_reply_must_fit_every_limit(check, limits, key):
    want = rf"sampling\.max_new_tokens=\d+ and the \d+ tokens of streams\.toy's opening prompt exceed {key}"
    with pytest.raises(ConfigError, match=want):
        check(**limits)
