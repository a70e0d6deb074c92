from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest

import claw_envs  # noqa: F401  registers the ids


@pytest.fixture
def make() -> Iterator[Callable[..., gymnasium.Env[Any, str]]]:
    """Makes terminal environments and closes them after the test."""
    made: list[gymnasium.Env[Any, str]] = []

    def _make(**kwargs: Any) -> gymnasium.Env[Any, str]:
        made.append(gymnasium.make("ClawTerminal-v0", disable_env_checker=True, **kwargs))
        return made[-1]

    yield _make
    for env in made:
        env.close()
