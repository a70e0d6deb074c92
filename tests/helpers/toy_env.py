"""A third party's environment: no sandbox, one to three turns, an outcome that depends on the reply alone."""

import threading
import time
from dataclasses import dataclass
from typing import ClassVar

import gymnasium
from gymnasium import spaces

from claw_envs.errors import SandboxLost
from claw_envs.types import FailureKind, NextState, Role

ENTERED, HANGING = threading.Event(), threading.Event()
"""Something hangs; set `HANGING` to let it go on."""
ERRORS = {"KeyError": KeyError, "OSError": OSError, "SystemExit": SystemExit, "SandboxLost": SandboxLost}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyState(NextState):
    length: int = 0


class ToyEnv(gymnasium.Env):
    """Solved by a reply with an even number of characters; `fail_every` breaks the world now and then.

    `hang_on` and `raise_on` name what hangs or raises `error`; `answer` replaces parts of a step's answer.
    """

    metadata: ClassVar = {"render_modes": []}
    tools = ()

    def __init__(
        self, turns=2, fail_every=0, hang_on="", raise_on="", error="KeyError", answer=None, pause_s=0.0
    ) -> None:
        self.system_prompt = "Say something."
        self.observation_space = spaces.Dict({"instruction": spaces.Text(100)})
        self.action_space = spaces.Text(1000)
        self._turns = turns
        self._fail_every = fail_every
        self._resets = 0
        self._hang_on, self._raise_on, self._error = hang_on, raise_on, error
        self._answer = answer or {}
        self._pause_s = pause_s
        self._misbehave("init")

    def _misbehave(self, where):
        if self._hang_on == where:
            ENTERED.set()
            HANGING.wait(60)
        if self._raise_on == where:
            raise ERRORS[self._error]("the kitchen is closed")

    def close(self):
        self._misbehave("close")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._misbehave("reset")
        self._resets += 1
        self._step = 0
        self._good = 0
        self._task = int(self.np_random.integers(1000))
        state = ToyState(role=Role.USER, text="")
        info = {"next_state": state, "valid": True, "failure_kind": None, "task_id": f"toy/{self._task}"}
        return {"instruction": f"Task {self._task}: go on."}, info

    def step(self, action):
        self._misbehave("step")
        time.sleep(self._pause_s)  # so that a test can act while a run still goes on
        self._step += 1
        even = len(action) % 2 == 0
        self._good += even
        broken = self._fail_every and self._task % self._fail_every == 0
        last = self._step >= self._turns
        state = ToyState(
            role=Role.USER,
            text=f"{len(action)} characters",
            length=len(action),
            is_error=not even,
            valid=not broken,
            failure_kind=FailureKind.SANDBOX_LOST if broken else None,
        )
        info = {
            "next_state": self._answer.get("next_state", state),
            "valid": not broken,
            "failure_kind": state.failure_kind,
            "task_id": f"toy/{self._task}",
        }
        reward = float(self._good == self._step) if last and not broken else 0.0
        return {"instruction": ""}, self._answer.get("reward", reward), last and not broken, bool(broken), info


class BareEnv(gymnasium.Env):
    """As little as an environment may have: text in, text out, and the keys of `info`."""

    metadata: ClassVar = {"render_modes": []}
    observation_space = action_space = spaces.Text(1000)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return "Say it.", self._info("")

    def step(self, action):
        return "", 0.0, False, False, self._info("heard")

    def _info(self, text):
        state = ToyState(role=Role.USER, text=text)
        return {"next_state": state, "valid": True, "failure_kind": None, "task_id": "bare"}


class RenderingEnv(ToyEnv):
    """Tells the model more than its next state holds."""

    def step(self, action):
        self._text = f"<{len(action)} characters>"
        return super().step(action)

    def render_next_state(self):
        return self._text


gymnasium.register(id="Toy-v0", entry_point=ToyEnv)
gymnasium.register(id="Bare-v0", entry_point=BareEnv)
gymnasium.register(id="Rendering-v0", entry_point=RenderingEnv)
