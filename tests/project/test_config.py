"""Configuration: what is taken, what is refused, and that a refusal names the key and the way out."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from claw_train import config
from claw_train.cli import compose
from claw_train.config import EngineConfig, TrainConfig, build, conf_dir, resolved_guards, to_config
from claw_train.errors import ConfigError
from claw_train.models import ModelFolder
from claw_train.preflight import Preflight

STREAM = {"name": "terminal", "id": "ClawTerminal-v0"}
SMALLEST: dict[str, Any] = {
    "model": {"name": "m"},
    "streams": [STREAM],
    "engine": {},
    "judge": {"_target_": "claw_train.judging.rules.RulesJudge"},
    "method": {},
    "trainer": {},
}


class Plug:
    """A plug-in for `build`."""

    def __init__(self, name: str, weight: float = 1.0, size: int = 2, strict: bool = False) -> None:
        self.seen = (name, weight, size, strict)


def numeric_keys() -> Iterator[tuple[str, str]]:
    for section, schema in config._SECTIONS.items():
        for f in dataclasses.fields(schema):
            if f.type in (int, float, float | None):
                yield section, f.name


def with_value(section: str, key: str, value: object) -> dict[str, Any]:
    return {**SMALLEST, section: {**SMALLEST.get(section, {}), key: value}}


def test_defaults_fill_what_is_not_said():
    made = to_config({**SMALLEST, "trainer": {"steps": 3}})
    assert isinstance(made, TrainConfig)
    assert made.trainer.steps == 3
    assert made.engine == EngineConfig()
    assert made.streams[0].share == 1.0


def test_the_result_is_frozen_and_plain():
    made = to_config({**SMALLEST, "streams": [{**STREAM, "kwargs": {"levels": [1, 2]}}]})
    assert type(made.streams[0].kwargs["levels"]) is list
    assert type(made.judge) is dict
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.trainer.steps = 4  # type: ignore[misc]


def test_an_environment_is_a_stream_of_its_own():
    rest = {k: v for k, v in SMALLEST.items() if k != "streams"}
    assert to_config({**rest, "env": STREAM}) == to_config(SMALLEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainer": {"stepz": 3}}, r"unknown key trainer\.stepz: did you mean trainer\.steps\?"),
        ({"trainr": {}}, r"unknown key trainr: did you mean trainer\?"),
        ({"engine": {"zzz": 1}}, r"unknown key engine\.zzz: valid keys: .*concurrency"),
        (
            {"streams": [{**STREAM, "shares": 2}]},
            r"unknown key streams\[0\]\.shares: did you mean streams\[0\]\.share\?",
        ),
        ({"trainer": {"steps": "many"}}, r"^trainer\.steps: .*'many'"),
        ({"trainer": {"steps": None}}, r"^trainer\.steps: "),
        ({"trainer": 3}, "^trainer=3 is not a mapping"),
        ({"model": {"name": "m", "lora_targets": "q_proj"}}, r"^model\.lora_targets: "),
        ({"seed": "x"}, "^seed: .*'x'"),
        ({"judge": None}, "^judge: "),
        ({"streams": "terminal"}, "^streams='terminal' is not a list"),
        ({"streams": []}, "^streams is empty: .*env=terminal"),
        ({"streams": [STREAM, STREAM]}, "^streams have equal names"),
        ({"streams": [{"name": "t"}]}, r"^streams\[0\]\.id: "),
        ({"streams": [{**STREAM, "share": 0}]}, r"^streams\.terminal\.share=0\.0 is out of range"),
        ({"reward": "random"}, "^reward='random' is out of range: verified or shuffled"),
        ({"trainer": {"kind": "dora"}}, r"^trainer\.kind='dora' .*lora or full"),
        ({"trainer": {"dtype": "float16"}}, r"^trainer\.dtype='float16'"),
        ({"method": {"cut_reply": "keep"}}, r"^method\.cut_reply='keep'"),
        ({"engine": {"kind": "vllm"}}, r"^engine\.kind='vllm'"),
        ({"engine": {"kind": "url"}}, r"^engine\.url=None .*http://HOST:PORT"),
        ({"engine": {"kind": "url", "url": "gpu:30000"}}, r"^engine\.url='gpu:30000' .*http://HOST:PORT"),
        ({"engine": {"url": "http://x"}}, r"^engine\.url='http://x'"),
        ({"trainer": {"group_size": 1}}, r"^trainer\.group_size=1 .*at least 2: a try is compared"),
        ({"env": STREAM}, r"^env and streams are both given.*~env=terminal"),
        ({"engine": {"port": 65536}}, r"^engine\.port=65536 is out of range: at least 0 and at most 65535"),
        ({"guards": {"cut_share": 1.5}}, r"^guards\.cut_share=1\.5 "),
        ({"trainer": {"lr": math.inf}}, r"^trainer\.lr=inf "),
    ],
)
def test_what_is_wrong_is_named_in_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as caught:
        to_config({**SMALLEST, **change})
    assert "\n" not in str(caught.value)


URL = {"kind": "url", "url": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("section", "fields", "key", "value"),
    [
        *(("engine", URL, key, 7) for key in config._OWN_SERVER.split()),
        ("engine", {"kind": "embedded"}, "api_key_env", "OTHER"),
        ("engine", {"kind": "scripted"}, "api_key_env", "OTHER"),
        ("trainer", {"kind": "lora"}, "freeze_embeddings", False),
        ("trainer", {"kind": "lora"}, "checkpoint_every_minutes", 3.0),
        ("trainer", {"kind": "full"}, "lora_rank", 4),
        ("trainer", {"kind": "full"}, "lora_alpha", 8),
    ],
)
def test_a_key_without_effect_is_refused_by_name(section, fields, key, value):
    to_config({**SMALLEST, section: fields})
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}=.* has no effect with {section}\.kind={fields['kind']}"):
        to_config({**SMALLEST, section: {**fields, key: value}})


def test_what_a_server_elsewhere_is_asked_with_may_be_set():
    mine = {**URL, "dtype": "float32", "api_key_env": "OTHER", "timeout_s": 7, "retries": 1, "concurrency": 3}
    assert to_config({**SMALLEST, "engine": mine}).engine.concurrency == 3


URL_GIVEN = ["engine=url", "engine.url=http://127.0.0.1:1"]


@pytest.mark.parametrize("overrides", [[], ["trainer=full"], URL_GIVEN, [URL_GIVEN[1], "engine.kind=url"]])
def test_what_the_yaml_files_compose_to_is_valid(overrides):
    made = to_config(compose(overrides))
    assert made.engine.url == (URL_GIVEN[1].partition("=")[2] if "engine.url" in str(overrides) else None)


def test_an_engine_given_by_url_needs_the_url():
    with pytest.raises(ConfigError, match=r"^engine\.url=None"):
        to_config(compose(["engine=url"]))


def test_streams_replace_the_environment_that_was_taken_away():
    made = to_config(compose(["~env=terminal", "streams=[{name: mine, id: Mine-v0}]"]))
    assert [stream.name for stream in made.streams] == ["mine"]


@pytest.mark.parametrize(
    ("engine", "trainer", "said", "limits"),
    [
        ("float32", "float32", {}, (1e-3, 1e-8)),
        ("bfloat16", "float32", {}, (None, 1e-2)),
        ("float32", "bfloat16", {}, (None, 1e-2)),
        ("float32", "float32", {"mismatch_k3": 1e9}, (1e-3, 1e9)),
        ("bfloat16", "bfloat16", {"mismatch_max_abs": 0.5}, (0.5, 1e-2)),
    ],
)
def test_mismatch_limits_follow_the_number_formats_unless_given(engine, trainer, said, limits):
    formats = {"engine": {"dtype": engine}, "trainer": {"dtype": trainer}}
    guards = resolved_guards(to_config({**SMALLEST, **formats, "guards": {**said, "window": 9}}))
    assert (guards.mismatch_max_abs, guards.mismatch_k3, guards.window) == (*limits, 9)


def test_the_trainer_is_given_the_limits_of_its_number_format(tmp_path):
    exact = {"engine": {"dtype": "float32"}, "trainer": {"dtype": "float32"}}
    model = ModelFolder(name="m", path=tmp_path, tokenizer_path=tmp_path, source="test")
    plan: Any = {"config": to_config({**SMALLEST, **exact}), "model": model, "renderer": None, "judge": None}
    assert Preflight(**plan).trainer_spec(tmp_path).guards.mismatch_k3 == 1e-8


def test_a_missing_section_is_named():
    with pytest.raises(ConfigError, match="model"):
        to_config({k: v for k, v in SMALLEST.items() if k != "model"})


@pytest.mark.parametrize(("section", "key"), list(numeric_keys()))
def test_no_number_may_be_negative(section, key):
    with pytest.raises(ConfigError, match=rf"^{section}\.{key}=-7"):
        to_config(with_value(section, key, -7))


@pytest.mark.parametrize("share", [0, 1])
def test_the_ends_of_a_closed_range_are_inside(share):
    assert to_config(with_value("guards", "cut_share", share)).guards.cut_share == share


def test_a_checkout_finds_its_configuration_folder():
    assert (conf_dir() / "config.yaml").is_file()


def test_a_package_without_configuration_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "__file__", str(tmp_path / "claw_train" / "config.py"))
    with pytest.raises(ConfigError, match=r"no conf/ folder .*reinstall"):
        conf_dir()


def test_build_makes_the_plug_in():
    made = build({"_target_": f"{__name__}.Plug", "name": "a", "weight": 2}, "judge")
    assert made.seen == ("a", 2, 2, False)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({}, r"^judge\._target_=None is not a dotted name"),
        ({"_target_": "Plug"}, r"^judge\._target_='Plug' is not a dotted name"),
        ({"_target_": "claw_train.nowhere.Plug"}, r"^judge\._target_='claw_train\.nowhere\.Plug' cannot be used"),
        ({"_target_": "claw_train.config.Nothing"}, r"^judge\._target_=.* cannot be used: .*Nothing"),
        ({"_target_": "..Plug"}, r"^judge\._target_='\.\.Plug' cannot be used"),
        (
            {"_target_": f"{__name__}.Plug", "name": "a", "wieght": 1},
            r"^unknown key judge\.wieght: did you mean judge\.weight",
        ),
        ({"_target_": f"{__name__}.Plug"}, "^judge lacks name"),
        ({"_target_": f"{__name__}.Plug", "name": 3}, r"^judge\.name=3 is not of type str"),
        ({"_target_": f"{__name__}.Plug", "name": "a", "size": 1.5}, r"^judge\.size=1\.5 is not of type int"),
        ({"_target_": f"{__name__}.Plug", "name": "a", "size": True}, r"^judge\.size=True is not of type int"),
    ],
)
def test_a_plug_in_that_cannot_be_built_is_named(node, message):
    with pytest.raises(ConfigError, match=message):
        build(node, "judge")
