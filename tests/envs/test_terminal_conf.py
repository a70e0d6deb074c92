"""The demo's values make a sound environment."""

from pathlib import Path

import gymnasium
import pytest
import yaml

from claw_envs.terminal.families import FAMILIES

CONF = Path(__file__).parents[2] / "conf" / "env" / "terminal.yaml"


def stream():
    return yaml.safe_load(CONF.read_text())


def test_every_trained_family_has_its_example_in_the_prompt():
    env = gymnasium.make(stream()["id"], disable_env_checker=True, **stream()["kwargs"])
    families = stream()["kwargs"]["families"]
    shown = [message["content"] for message in env.unwrapped.example_messages if message["role"] == "user"]
    assert shown == [FAMILIES[name].example[0] for name in families]


@pytest.mark.sandbox
@pytest.mark.parametrize("split", ["train", "eval", "heldout"])
def test_a_fenced_oracle_earns_one_in_a_single_turn(split):
    env = gymnasium.make(stream()["id"], disable_env_checker=True, **stream()["kwargs"])
    env.reset(seed=3, options={"split": split})
    (command,) = env.unwrapped.task.oracle
    assert env.step(f"```\n{command}\n```")[1:4] == (1.0, False, True)
    env.close()
