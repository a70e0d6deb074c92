import json
import subprocess
import sys

import gymnasium
import pytest
from gymnasium.envs.registration import EnvSpec

from claw_envs.terminal.env import TerminalEnv

HEAVY = ("torch", "transformers", "sglang", "docker", "playwright", "pyautogui", "pydantic", "httpx")


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_import_loads_nothing_beyond_gymnasium():
    code = """
import sys, json
import gymnasium
before = set(sys.modules)
import claw_envs
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    assert json.loads(run(code)) == ["claw_envs"]


def test_making_an_environment_loads_nothing_heavy():
    code = f"""
import sys, json, gymnasium
gymnasium.make("claw_envs:ClawTerminal-v0").close()
print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""
    assert json.loads(run(code)) == []


def test_a_second_import_does_not_register_again():
    code = """
import warnings
warnings.simplefilter("error")
import importlib, claw_envs
importlib.reload(claw_envs)
print("quiet")
"""
    assert run(code) == "quiet\n"


def test_spec_round_trips_through_json(make):
    env = make(families=["rename", "copy"], levels=[1, 2], max_turns=3)
    spec = EnvSpec.from_json(env.spec.to_json())
    again = gymnasium.make(spec)
    assert again.unwrapped.settings == env.unwrapped.settings
    again.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("families", ["rename", "nosuch"]),
        ("families", "rename"),
        ("levels", []),
        ("levels", [9]),
        ("levels", [True]),
        ("split", "test"),
        ("max_turns", 0),
        ("max_turns", "3"),
        ("max_turns", True),
        ("action_format", "xml"),
        ("sandbox", 3),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "1"),
        ("memory_mb", 1),
        ("examples", -1),
        ("examples", 99),
        ("text_limit", 10),
    ],
)
def test_a_bad_argument_is_refused_by_name(make, key, value):
    name = {"families": "famil", "levels": "level"}.get(key, key)
    with pytest.raises(ValueError, match=name):
        make(**{key: value})


def test_a_render_mode_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        TerminalEnv(render_mode="rgb_array")


def test_an_unknown_argument_is_refused_by_name(make):
    with pytest.raises(TypeError, match="nosuch"):
        make(nosuch=1)
