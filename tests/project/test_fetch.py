"""`claw fetch`: what it says and when it refuses."""

import json
from dataclasses import replace

import pytest

from claw_envs import cli
from claw_train.models import model_config


@pytest.fixture
def weights(tmp_path, monkeypatch):
    """A folder that passes for a model, given to every configuration as its path."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("claw_train.fetch.model_config", lambda name: replace(model_config(name), path=str(folder)))
    return folder


def test_each_model_is_named_with_its_place_and_source(weights, capsys):
    assert cli.main(["fetch", "smollm2-135m", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"smollm2-135m: {weights} (path)", f"tiny: {weights} (path)"]


def test_an_unknown_model_is_refused_with_the_known_ones(capsys):
    assert cli.main(["fetch", "gpt-9"]) == 2
    said = capsys.readouterr().err
    assert "'gpt-9' is unknown" in said
    assert "smollm2-135m" in said


def test_a_model_that_cannot_be_had_stops_the_rest(weights, capsys):
    (weights / "model.safetensors").unlink()
    assert cli.main(["fetch", "smollm2-135m", "tiny"]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
