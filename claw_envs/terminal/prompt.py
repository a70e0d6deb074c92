"""What the agent is told beside the task: how to answer, which commands there are, worked examples.

The system text and the examples are the same for every task, so that an engine computes them once.
"""

from claw_envs.actions import ActionFormat

_RULES = {
    ActionFormat.RAW: "Answer with one shell command and nothing else.",
    ActionFormat.FENCED: "Answer with one shell command in a code block.",
}

_MENU = """\
Commands:
mv OLD NEW
cp FILE COPY
rm FILE
mkdir FOLDER
touch FILE
chmod +x FILE
wc -l FILE > OUT
sort FILE > OUT
grep WORD FILE > OUT
echo WORD >> FILE"""

_EXAMPLES = (
    ("Count the lines of a.txt into b.txt.", "wc -l a.txt > b.txt"),
    ("Rename x.txt to y.txt.", "mv x.txt y.txt"),
    ("Make a folder named docs.", "mkdir docs"),
    ("Add the line hello to c.txt.", "echo hello >> c.txt"),
)
MAX_EXAMPLES = len(_EXAMPLES)


def system_prompt(action_format: ActionFormat, *, submit: bool) -> str:
    """The system message.

    Args:
        action_format: how a reply carries its command.
        submit: whether to explain how to end a longer episode.
    """
    end = " When the task is done, answer submit." if submit else ""
    return f"{_RULES[action_format]}{end}\n{_MENU}"


def example_messages(action_format: ActionFormat, count: int) -> tuple[dict[str, str], ...]:
    """`count` worked examples as earlier chat turns: user, assistant, user, ..."""
    messages: list[dict[str, str]] = []
    for instruction, command in _EXAMPLES[:count]:
        reply = f"```\n{command}\n```" if action_format is ActionFormat.FENCED else command
        messages += [{"role": "user", "content": instruction}, {"role": "assistant", "content": reply}]
    return tuple(messages)
