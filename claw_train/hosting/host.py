"""One environment on its own thread: the only place where asyncio and blocking code meet.

Calls go in, Gymnasium's tuples come out. Playwright and others are bound to the thread that made them, so an
environment is made, used and closed on one thread. Knows nothing of policies or tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium

from claw_envs.errors import SandboxTimeout
from claw_envs.types import NextState
from claw_train.config import StreamConfig
from claw_train.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """What an episode begins with."""

    system_prompt: str
    example_messages: tuple[Mapping[str, str], ...]
    """Worked examples as chat messages (`role`, `content`)."""
    instruction: str
    task_id: str
    valid: bool
    """False when the world could not be set up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one action led to."""

    next_state: NextState
    reward: float
    """Verified outcome in [0, 1]; 0.0 before the end."""
    terminated: bool
    truncated: bool
    valid: bool
    """False when the world failed; then `reward` means nothing."""


class EnvHost:
    """Drives one environment. Not for use by two episodes at once."""

    def __init__(self, stream: StreamConfig, *, deadline_s: float = 120.0) -> None:
        self._stream = stream
        self._deadline_s = deadline_s
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"env-{stream.name}")
        self._env: gymnasium.Env[Any, Any] | None = None
        self.lost = False
        """True after a call that never came back; the host must be replaced."""

    async def _call(self, what: str, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._thread, work)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.shield(future)
        except TimeoutError:
            if not future.done():
                self.lost = True
                raise SandboxTimeout(f"{self._stream.id}: no answer to {what} in {self._deadline_s:.0f} s") from None
            raise

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> EpisodeStart:
        """Starts an episode; makes the environment first if need be.

        Raises:
            ConfigError: the environment's id or arguments are wrong.
            SandboxTimeout: no answer in time.
        """
        return await self._call("reset", lambda: self._reset(seed, dict(options)))

    def _reset(self, seed: int, options: dict[str, Any]) -> EpisodeStart:
        if self._env is None:
            self._env = make_env(self._stream)
        obs, info = self._env.reset(seed=seed, options=options)
        inner: Any = self._env.unwrapped
        return EpisodeStart(
            system_prompt=inner.system_prompt,
            example_messages=tuple(getattr(inner, "example_messages", ())),
            instruction=obs["instruction"],
            task_id=info["task_id"],
            valid=info["valid"],
        )

    async def step(self, reply: str) -> StepOutcome:
        """Carries out one reply.

        Raises:
            SandboxTimeout: no answer in time.
        """
        return await self._call("step", lambda: self._step(reply))

    def _step(self, reply: str) -> StepOutcome:
        assert self._env is not None, "step before reset"
        _, reward, terminated, truncated, info = self._env.step(reply)
        return StepOutcome(
            next_state=info["next_state"],
            reward=float(reward),
            terminated=terminated,
            truncated=truncated,
            valid=info["valid"],
        )

    async def close(self) -> None:
        """Closes the environment and ends the thread; a lost one is left to its sandbox's lease."""
        env, self._env = self._env, None
        if env is not None and not self.lost:
            try:
                await self._call("close", env.close)
            except SandboxTimeout as error:
                logger.warning("%s", error)
        self._thread.shutdown(wait=False, cancel_futures=True)


def make_env(stream: StreamConfig) -> gymnasium.Env[Any, Any]:
    """`gym.make` of a stream's environment.

    Raises:
        ConfigError: unknown id, or arguments that it refuses; names the key.
    """
    import claw_envs  # noqa: F401  registers our ids

    try:
        return gymnasium.make(stream.id, disable_env_checker=True, **stream.kwargs)
    except (gymnasium.error.Error, ModuleNotFoundError) as error:
        raise ConfigError(f"streams.{stream.name}.id={stream.id!r}: {error}") from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"streams.{stream.name}.kwargs: {error}") from None
