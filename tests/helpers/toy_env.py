"""A third party's environment: no sandbox, one to three turns, an outcome that depends on the reply alone."""

from dataclasses import dataclass
from typing import ClassVar

import gymnasium
from gymnasium import spaces

from claw_envs.types import FailureKind, NextState, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyState(NextState):
    length: int = 0


class ToyEnv(gymnasium.Env):
    """Solved by a reply with an even number of characters; `fail_every` breaks the world now and then."""

    metadata: ClassVar = {"render_modes": []}
    tools = ()

    def __init__(self, turns: int = 2, fail_every: int = 0, hang_on: str = "") -> None:
        self.system_prompt = "Say something."
        self.observation_space = spaces.Dict({"instruction": spaces.Text(100)})
        self.action_space = spaces.Text(1000)
        self._turns = turns
        self._fail_every = fail_every
        self._resets = 0
        self._hang_on = hang_on

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._resets += 1
        self._step = 0
        self._good = 0
        self._task = int(self.np_random.integers(1000))
        state = ToyState(role=Role.USER, text="")
        info = {"next_state": state, "valid": True, "failure_kind": None, "task_id": f"toy/{self._task}"}
        return {"instruction": f"Task {self._task}: go on."}, info

    def step(self, action):
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
            "next_state": state,
            "valid": not broken,
            "failure_kind": state.failure_kind,
            "task_id": f"toy/{self._task}",
        }
        reward = float(self._good == self._step) if last and not broken else 0.0
        return {"instruction": ""}, reward, last and not broken, bool(broken), info


gymnasium.register(id="Toy-v0", entry_point=ToyEnv)
