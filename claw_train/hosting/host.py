"""One environment on its own thread: the only place where asyncio and blocking code meet.

Calls go in, what an episode needs of Gymnasium's tuples comes out, checked. Playwright and others are bound to the
thread that made them, so an environment is made, used and closed on one thread. Knows nothing of policies or tasks.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import gymnasium

from claw_envs.errors import ClawEnvError, SandboxError, SandboxTimeout
from claw_envs.types import NextState
from claw_train.config import StreamConfig
from claw_train.errors import ConfigError, boundary
from claw_train.hosting.thread import EnvThread, LostThreads

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CLOSE_S = 30.0
"""Most that closing may take, so that a long deadline of a stream does not hold up the end of a run."""


class EnvironmentBroke(SandboxError):
    """An environment raised an error of its own, or answered what no environment may answer."""


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
    failure_kind: str = ""
    """Why `valid` is False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one action led to."""

    next_state: NextState
    text: str
    """What the model is told of it."""
    reward: float
    """Verified outcome in [0, 1] at the end of an episode; nothing before it."""
    terminated: bool
    truncated: bool
    valid: bool
    """False when the world failed; then `reward` means nothing."""


class EnvHost:
    """Drives one environment. Not for use by two episodes at once."""

    def __init__(self, stream: StreamConfig, lost_threads: LostThreads | None = None) -> None:
        """`lost_threads` is shared by the hosts of a stream and bounds how many may hang."""
        self._stream = stream
        self._thread = EnvThread(f"env-{stream.name}")
        self._lost_threads = lost_threads or LostThreads(stream.name)
        self._env: gymnasium.Env[Any, Any] | None = None
        self.lost = False
        """True after a call that never came back; the host must be replaced."""
        self.command_timeout_s: float | None = None
        """The environment's own limit for one command, known after a reset; None when it names none."""

    async def _call(self, what: str, work: Callable[[], T], deadline_s: float) -> T:
        """Runs `work` on the thread; after the deadline it is left there and the host is lost."""
        future = self._thread.submit(work)
        try:
            async with asyncio.timeout(deadline_s):
                return await future
        except TimeoutError:
            if not future.cancelled():  # an error of the environment's own, or an answer at the last moment
                return future.result()
            self.lost = True
            self._lost_threads.add(self._thread)
            raise SandboxTimeout(f"{self._stream.id}: no answer to {what} in {deadline_s:g} s") from None

    async def reset(self, *, seed: int, options: Mapping[str, Any]) -> EpisodeStart:
        """Starts an episode; makes the environment first if need be.

        Raises:
            ConfigError: the environment's id or arguments are wrong.
            SandboxError: no answer in time, too many that hang already, or an error of the environment's own.
        """
        self._lost_threads.check()
        return await self._call("reset", lambda: self._reset(seed, dict(options)), self._stream.deadline_s)

    def _reset(self, seed: int, options: dict[str, Any]) -> EpisodeStart:
        with self._discarding("reset"):
            if self._env is None:
                self._env = make_env(self._stream)
            inner: Any = self._env.unwrapped
            self.command_timeout_s = _command_timeout_s(inner)
            obs, info = self._env.reset(seed=seed, options=options)
            return EpisodeStart(
                system_prompt=_text(getattr(inner, "system_prompt", ""), "system_prompt"),
                example_messages=tuple(getattr(inner, "example_messages", ())),
                instruction=_text(obs if isinstance(obs, str) else obs["instruction"], "the instruction"),
                task_id=_text(info["task_id"], "task_id"),
                valid=bool(info["valid"]),
                failure_kind=str(info.get("failure_kind") or ""),
            )

    async def step(self, reply: str) -> StepOutcome:
        """Carries out one reply.

        Raises:
            SandboxError: no answer in time, or an error of the environment's own.
        """
        return await self._call("step", lambda: self._step(reply), self._stream.deadline_s)

    def _step(self, reply: str) -> StepOutcome:
        assert self._env is not None, "step before reset"
        with self._discarding("step"):
            _, reward, terminated, truncated, info = self._env.step(reply)
            state, valid, over = info["next_state"], bool(info["valid"]), bool(terminated or truncated)
            if not isinstance(state, NextState):
                raise TypeError(f"next_state is a {type(state).__name__}, not a claw_envs.types.NextState")
            if over and valid and not 0.0 <= float(reward) <= 1.0:
                raise ValueError(f"the outcome {reward} is not in [0, 1]")
            render = None if over or not valid else getattr(self._env.unwrapped, "render_next_state", None)
            return StepOutcome(
                next_state=state,
                text=_text(render() if render else state.text, "the next state's text"),
                reward=float(reward),
                terminated=bool(terminated),
                truncated=bool(truncated),
                valid=valid,
            )

    @contextmanager
    def _discarding(self, what: str) -> Iterator[None]:
        """After a foreign error nobody knows what state the environment is in: the next episode makes another."""
        try:
            with foreign(f"{self._stream.id}: {what}"):
                yield
        except EnvironmentBroke:
            self._close_env()
            raise

    def _close_env(self) -> None:
        """On the environment's thread, like every other use of it."""
        env, self._env = self._env, None
        if env is None:
            return
        try:
            with foreign(f"{self._stream.id}: close"):
                env.close()
        except ClawEnvError as error:
            logger.warning("%s", error)

    async def close(self) -> None:
        """Closes the environment and ends the thread; a lost one does so if ever its call comes back."""
        if not self.lost and self._thread.usable:
            try:
                await self._call("close", self._close_env, min(_CLOSE_S, self._stream.deadline_s))
            except SandboxError as error:
                logger.warning("%s", error)
        self._thread.end(self._close_env)


@contextmanager
def foreign(what: str) -> Iterator[None]:
    """Turns whatever an environment raises into `EnvironmentBroke`; errors of `claw_envs` and our own pass."""
    with boundary(EnvironmentBroke, what, passing=(ClawEnvError,)):
        try:
            yield
        except (SystemExit, asyncio.CancelledError) as error:  # they would end the thread without a word
            raise EnvironmentBroke(f"{what}: {type(error).__name__}: {error}") from error


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is a {type(value).__name__}, not text")
    return value


def _command_timeout_s(inner: object) -> float | None:
    """`timeout_s` of an environment or of its `settings`."""
    for holder in (inner, getattr(inner, "settings", None)):
        value = getattr(holder, "timeout_s", None)
        if isinstance(value, (int, float)):
            return float(value)
    return None


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
