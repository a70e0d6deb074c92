"""What the agent is told beside the task: how to answer, and worked examples.

In: the action format and the families in use. Out: the system text and earlier chat turns. Both are the same for every
task of an environment, so that an engine computes them once.
"""

from collections.abc import Sequence

from claw_envs.actions import SUBMIT, ActionFormat
from claw_envs.terminal.families import FAMILIES

_RULES = {
    ActionFormat.RAW: "Answer with one shell command and nothing else.",
    ActionFormat.FENCED: "Answer with one shell command in a code block.",
}
_END = f" When the task is done, answer {SUBMIT}."


def system_prompt(action_format: ActionFormat, *, submit: bool) -> str:
    """The system message.

    Args:
        action_format: how a reply carries its command.
        submit: whether to say how a longer episode is ended.
    """
    return _RULES[action_format] + (_END if submit else "")


def example_messages(action_format: ActionFormat, families: Sequence[str], count: int) -> tuple[dict[str, str], ...]:
    """Worked examples of the first `count` of `families` as chat turns: user, assistant, user, ..."""
    examples = [FAMILIES[name].example for name in families]
    messages: list[dict[str, str]] = []
    for instruction, command in [example for example in examples if example is not None][:count]:
        reply = f"```\n{command}\n```" if action_format is ActionFormat.FENCED else command
        messages += [{"role": "user", "content": instruction}, {"role": "assistant", "content": reply}]
    return tuple(messages)
