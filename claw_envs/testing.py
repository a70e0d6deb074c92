"""What every environment and sandbox of ours must hold, as functions to call in a test.

In: an environment (made by `gymnasium.make`) or a sandbox. Out: nothing, or an AssertionError that says which rule
broke. Also for environments outside this repository.
"""

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env, data_equivalence

from claw_envs.errors import TaskError
from claw_envs.sandbox.contract import check_sandbox
from claw_envs.types import NextState

__all__ = ["check_claw_env", "check_sandbox"]

INFO_KEYS = {"next_state", "valid", "failure_kind", "task_id"}
_MARKER = "claw_probe_5821"

Env = gymnasium.Env[Any, str]


def silent_command(marker: str) -> str:
    """A raw shell command that holds the marker and that the world answers without repeating it."""
    return f": {marker}"


def check_claw_env(env: Env, *, silent_reply: Callable[[str], str] = silent_command, seed: int = 123) -> None:
    """Holds an environment to Gymnasium's rules and ours, and closes it.

    Args:
        env: made by `gymnasium.make`, so that it has a spec; three turns long at least.
        silent_reply: turns a marker into a reply that holds it and that the world answers without repeating it.
        seed: of the episodes that are played.

    Raises:
        AssertionError: a rule is broken.
        Warning: Gymnasium's own check warns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
    check_spec(env.spec)
    check_harness(env)
    check_options(env)
    replies = [silent_reply(_MARKER), silent_reply("once more")]
    check_repeatable(env, replies, seed)
    check_no_echo(env, replies[0], seed)
    check_turn_limit(env, replies[0], seed)
    check_close(env)


def check_spec(spec: EnvSpec | None) -> None:
    """The spec exists and survives JSON."""
    assert spec is not None, "make the environment with gymnasium.make"
    again = EnvSpec.from_json(spec.to_json())
    assert (again.id, again.entry_point) == (spec.id, spec.entry_point)
    assert again.kwargs == json.loads(json.dumps(spec.kwargs)), f"kwargs are not plain JSON values: {spec.kwargs}"


def check_harness(env: Env) -> None:
    """What a harness needs is there: system prompt, tools, worked examples, the text that a model is shown."""
    inner: Any = env.unwrapped
    obs, _ = env.reset(seed=1)
    assert isinstance(inner.system_prompt, str)
    json.dumps(inner.tools)
    assert all(set(m) == {"role", "content"} and m["role"] in ("user", "assistant") for m in inner.example_messages)
    assert inner.render_next_state() == obs["instruction"], "after a reset a model is shown the instruction"


def check_options(env: Env) -> None:
    """An unknown reset option is refused by name."""
    refusal = ""
    try:
        env.reset(options={_MARKER: 1})
    except TaskError as error:
        refusal = str(error)
    assert _MARKER in refusal, f"an unknown reset option was not refused by name: {refusal!r}"


def check_info(info: dict[str, Any]) -> None:
    """`info` holds the four keys, and they agree with one another."""
    assert set(info) == INFO_KEYS, f"info has {sorted(info)}, not {sorted(INFO_KEYS)}"
    state = info["next_state"]
    assert isinstance(state, NextState)
    assert info["valid"] is state.valid
    assert info["failure_kind"] == state.failure_kind
    assert isinstance(info["task_id"], str)


def check_repeatable(env: Env, replies: list[str], seed: int) -> None:
    """Two plays of one seed give equal observations, rewards and infos."""
    plays: list[list[Any]] = []
    for _ in range(2):
        obs, info = env.reset(seed=seed)
        check_info(info)
        play: list[Any] = [(obs, info)]
        for reply in replies:
            obs, reward, terminated, truncated, info = env.step(reply)
            check_info(info)
            play.append((obs, reward, terminated, truncated, info))
        plays.append(play)
    assert data_equivalence(plays[0], plays[1], exact=True), "two plays of one seed differ"


def check_no_echo(env: Env, silent_reply: str, seed: int) -> None:
    """A next state never holds what the policy said, unless the world said it too."""
    env.reset(seed=seed)
    state = env.step(silent_reply)[4]["next_state"]
    held = [f.name for f in dataclasses.fields(state) if _MARKER in repr(getattr(state, f.name))]
    assert not held, f"policy output stands in next_state.{', '.join(held)}"


def check_turn_limit(env: Env, silent_reply: str, seed: int) -> None:
    """The environment ends an episode at its own limit, truncated, valid and graded."""
    inner: Any = env.unwrapped
    env.reset(seed=seed)
    for turn in range(1, inner.max_turns + 1):
        _, reward, terminated, truncated, info = env.step(silent_reply)
        assert info["valid"]
        assert not terminated, "an undeclared end is no termination"
        assert truncated == (turn == inner.max_turns), f"turn {turn} of {inner.max_turns}: truncated={truncated}"
        assert 0.0 <= float(reward) <= 1.0


def check_close(env: Env) -> None:
    """Closing twice is allowed."""
    env.close()
    env.close()
