"""`ClawTerminal-v0`: one shell, one task, one verdict.

In: a reply's text. Out: Gymnasium's five values; the typed next state is in `info`. The environment owns its sandbox,
its turn limit and its grading. It knows nothing of policies, tokens or judges.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium

from claw_envs.actions import ActionKind, parse_action
from claw_envs.errors import GraderError, SandboxError, SandboxUnavailable
from claw_envs.sandbox.base import WORKDIR, Limits, Sandbox
from claw_envs.sandbox.factory import open_sandbox
from claw_envs.spaces import UnicodeText
from claw_envs.terminal import prompt, tasks
from claw_envs.terminal.observation import observation_space, observe
from claw_envs.terminal.render import command_state, failed_state, message_state
from claw_envs.terminal.settings import TerminalSettings, reset_options, to_format, to_tuple
from claw_envs.terminal.shell import prepare
from claw_envs.types import FailureKind, Role, Task, TerminalState

logger = logging.getLogger(__name__)

ACTION_BYTES = 16 * 1024
"""A longer reply is refused, never cut: half a command may do anything."""


@dataclass(kw_only=True)
class _Episode:
    """What changes between `reset` and the end."""

    task: Task
    sandbox: Sandbox | None = None
    """None when the reset failed and after the end."""
    state: TerminalState
    turns: int = 0
    over: bool = False
    transcript: list[str] = field(default_factory=list[str])


class TerminalEnv(gymnasium.Env[dict[str, Any], str]):
    """A shell in a disposable sandbox and one small task on files.

    ## Description
    The agent is told a task ("Rename notes.txt to plan.txt.") and answers with shell commands. A persistent bash runs
    each in a sandbox without network. When the episode ends, all of the agent's processes are killed and checks that
    the agent cannot reach look at the working folder.

    ## Action Space
    `UnicodeText`: the model's reply. With `action_format="raw"` the whole reply is the command; with `"fenced"` the
    first fenced code block is. `submit`, alone or as the last line, ends the episode (after the command, if there is
    one); so does a reply without a command. A reply that is too long or holds a NUL is refused and costs a turn.

    ## Observation Space
    `Dict` with `instruction` (the task) and the fields of `TerminalState`: `text` (what a model is shown), `role`,
    `stdout`, `stderr`, `exit_code` (-1: none), `timed_out`, `oom`, `bytes_total`, `cwd`, `command`, `is_error`,
    `newly_passed` (one check a line; known only where an episode is graded after its first reply; none where a check
    that passed before fails now), `valid`, `failure_kind` (empty: none).

    ## Rewards
    0.0 until the end, then the verdict: 1.0 if every check of the task passes, else 0.0. When the world failed it is
    0.0 with `info["valid"] = False` and must not be learned from.

    ## Starting State
    A fresh sandbox whose working folder holds the task's files; the shell starts there. `reset(seed=s)` draws family,
    level and task from `s`. Options: `task_id`, or any of `split`, `family`, `level`.

    ## Episode Termination
    Terminated: a declared end. Truncated: `max_turns` replies (graded all the same), or the sandbox was lost, could not
    be set up (then the first step ends the episode) or could not be graded.

    ## Information
    `next_state` (a `TerminalState`), `valid`, `failure_kind` (a `FailureKind` or None), `task_id`. Nothing that differs
    between two runs of one seed.

    ## Arguments
    - `families` (default: all of the split): names to draw from. They do not restrict a split that holds none of them.
    - `levels` (default `(1,)`): 1 takes one command, 2 two.
    - `split` (default `"train"`): `train`, `eval` (same families; unseen names, contents, wordings), `heldout` (unseen
      families).
    - `max_turns` (default 10), `action_format` (default `"raw"`), `timeout_s` (default 10.0, of one command).
    - `sandbox` (default `"auto"`): the backend. `memory_mb` (default 256): its memory.
    - `examples` (default 2): worked examples in `example_messages`, one of each of the first `families`.
    - `text_limit` (default 2000): characters of `text`.

    ## Version History
    - v0: first version.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012  Gymnasium declares it so

    def __init__(
        self,
        *,
        families: Sequence[str] = (),
        levels: Sequence[int] = (1,),
        split: str = "train",
        max_turns: int = 10,
        action_format: str = "raw",
        sandbox: str = "auto",
        timeout_s: float = 10.0,
        memory_mb: int = 256,
        examples: int = 2,
        text_limit: int = 2000,
        render_mode: str | None = None,
    ) -> None:
        self.settings = TerminalSettings(
            families=to_tuple("families", families),
            levels=to_tuple("levels", levels),
            split=split,
            max_turns=max_turns,
            action_format=to_format(action_format),
            sandbox=sandbox,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            examples=examples,
            text_limit=text_limit,
        )
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"render_mode={render_mode!r} is not ansi or None")
        self.render_mode = render_mode
        self.action_space = UnicodeText(ACTION_BYTES)
        self.observation_space = observation_space(text_limit)
        self._limits = Limits(memory_bytes=memory_mb * 2**20)
        self._episode: _Episode | None = None

    @property
    def system_prompt(self) -> str:
        """What the agent is told before any task; the same for every task."""
        return prompt.system_prompt(self.settings.action_format, submit=self.max_turns > 1)

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of tools; none: commands are text."""
        return ()

    @property
    def example_messages(self) -> tuple[dict[str, str], ...]:
        """Worked examples as earlier chat turns (`role`, `content`); the same for every task."""
        names = self.settings.families or tasks.families_of("train")
        return prompt.example_messages(self.settings.action_format, names, self.settings.examples)

    @property
    def max_turns(self) -> int:
        """Replies after which the environment ends an episode itself."""
        return self.settings.max_turns

    @property
    def task(self) -> Task:
        """The task of the running episode.

        Raises:
            ResetNeeded: there is none.
        """
        return self._running().task

    def render_next_state(self) -> str:
        """What a model is told next: the instruction after a reset, then the answer to its last reply."""
        return self._running().state.text

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Starts an episode in a fresh sandbox.

        Raises:
            TaskError: an unknown option or value.
            SandboxUnavailable: this machine cannot run the backend.
        """
        chosen = reset_options(options)
        super().reset(seed=seed)
        task = self._choose(chosen)
        self._drop()
        state = message_state(task.instruction, role=Role.USER, cwd=WORKDIR, command=True)
        self._episode = episode = _Episode(task=task, state=state)
        try:
            episode.sandbox = sandbox = open_sandbox(self.settings.sandbox, self._limits)
            prepare(sandbox, task)
        except SandboxUnavailable:
            self._drop()
            raise
        except (SandboxError, OSError) as error:
            self._fail(FailureKind.RESET_FAILED, error)
        return self._observe()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Carries out one reply.

        Raises:
            ResetNeeded: no episode is running.
            TypeError: the action is not text.
        """
        episode = self._running()
        if episode.over:
            raise gymnasium.error.ResetNeeded("the episode has ended: call reset() first")
        if not isinstance(action, str):
            raise TypeError(f"an action is text, got {type(action).__name__}")
        reward, terminated = 0.0, False
        if episode.sandbox is not None:
            try:
                reward, terminated = self._turn(episode, episode.sandbox, action)
            except GraderError as error:
                self._fail(FailureKind.GRADER_BROKE, error)
            except SandboxError as error:
                self._fail(FailureKind.SANDBOX_LOST, error)
        truncated = not terminated and (not episode.state.valid or episode.turns >= self.max_turns)
        if terminated or truncated:
            episode.over = True
            self._drop()
        obs, info = self._observe()
        return obs, reward, terminated, truncated, info

    def _turn(self, episode: _Episode, sandbox: Sandbox, reply: str) -> tuple[float, bool]:
        """One reply in a live sandbox: (outcome so far, whether the agent declared the end)."""
        episode.turns += 1
        cwd = episode.state.cwd
        if not self.action_space.contains(reply) or "\0" in reply:
            state, ends = message_state("[reply refused: too long, or not text]", cwd=cwd), False
        else:
            state, ends = self._act(sandbox, reply, cwd)
        value = 0.0
        if ends or episode.turns >= self.max_turns:
            sandbox.freeze()
            verdict = tasks.grade(episode.task, sandbox)
            value = verdict.value
            if episode.turns == 1:  # what came before the action is known: the start state
                state = replace(state, newly_passed=tasks.newly_passed(episode.task, verdict.checks))
        episode.state = state
        episode.transcript += [f"$ {reply}", state.text]
        return value, ends

    def _act(self, sandbox: Sandbox, reply: str, cwd: str) -> tuple[TerminalState, bool]:
        """Runs the reply's command, if it holds one: (next state, whether it declares the end)."""
        action = parse_action(reply, self.settings.action_format)
        if action.kind is ActionKind.SUBMIT:
            return message_state("[submitted]", cwd=cwd, command=True), True
        if action.kind is ActionKind.NONE:
            return message_state("[no command in the reply]", cwd=cwd), True
        timeout_s = self.settings.timeout_s
        result = sandbox.exec(action.command, timeout_s=timeout_s)
        limit = self.settings.text_limit
        return command_state(result, timeout_s=timeout_s, text_limit=limit), action.ends

    def render(self) -> str | None:
        """The episode so far as text; None without a render mode."""
        if self.render_mode is None:
            return None
        episode = self._running()
        return "\n".join([episode.task.instruction, *episode.transcript])

    def close(self) -> None:
        """Removes the sandbox. May be called again."""
        self._drop()

    def _choose(self, options: dict[str, Any]) -> Task:
        """The task that the options name, what they leave open drawn from the generator."""
        if "task_id" in options:
            return tasks.load_task(options["task_id"])
        split = options.get("split", self.settings.split)
        names = tasks.families_of(split)
        names = tuple(name for name in names if name in self.settings.families) or names
        draw = self.np_random
        drawn = (names[int(draw.integers(len(names)))], int(draw.integers(tasks.MAX_SEED)))
        level = self.settings.levels[int(draw.integers(len(self.settings.levels)))]
        return tasks.make_task(options.get("family", drawn[0]), split, drawn[1], options.get("level", level))

    def _running(self) -> _Episode:
        if self._episode is None:
            raise gymnasium.error.ResetNeeded("no episode is running: call reset() first")
        return self._episode

    def _fail(self, kind: FailureKind, error: Exception) -> None:
        """Makes the episode invalid; its sandbox goes."""
        episode = self._running()
        logger.warning("task %s: %s: %s", episode.task.id, kind, error)
        episode.state = failed_state(kind, cwd=episode.state.cwd)
        self._drop()

    def _drop(self) -> None:
        if self._episode is not None and self._episode.sandbox is not None:
            sandbox, self._episode.sandbox = self._episode.sandbox, None
            sandbox.close()

    def _observe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        episode = self._running()
        state = episode.state
        obs = observe(state, episode.task.instruction, self.settings.text_limit)
        return obs, {
            "next_state": state,
            "valid": state.valid,
            "failure_kind": state.failure_kind,
            "task_id": episode.task.id,
        }
