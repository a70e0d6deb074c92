import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_envs.actions import Action, ActionFormat, ActionKind, parse_action

RAW, FENCED = ActionFormat.RAW, ActionFormat.FENCED


def command(text: str, *, ends: bool = False) -> Action:
    return Action(kind=ActionKind.COMMAND, command=text, ends=ends)


SUBMIT = Action(kind=ActionKind.SUBMIT, ends=True)
NONE = Action(kind=ActionKind.NONE, ends=True)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("ls -la", command("ls -la")),
        ("  ls\n", command("ls")),
        ("cd /tmp\nls", command("cd /tmp\nls")),
        ("ls\nsubmit", command("ls", ends=True)),
        ("submit", SUBMIT),
        (" submit \n", SUBMIT),
        ("submit now", command("submit now")),
        ("submit\nls", command("submit\nls")),
        ("", NONE),
        (" \n\t", NONE),
    ],
)
def test_raw(reply, action):
    assert parse_action(reply, RAW) == action


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("```\nls\n```", command("ls")),
        ("```bash\nls -l\npwd\n```\nThat lists files.", command("ls -l\npwd")),
        ("Sure:\n\n~~~sh\nls\n~~~", command("ls")),
        ("```ls```", command("ls")),
        ("```\nls", command("ls")),
        ("```\nls\n```\n```\nrm x\n```", command("ls")),
        ("````\n```\nls\n```\n````", command("```\nls\n```")),
        ("```\nls\nsubmit\n```", command("ls", ends=True)),
        ("```\nsubmit\n```", SUBMIT),
        ("submit", SUBMIT),
        ("```\n```", NONE),
        ("I would list the files with ls.", NONE),
        ("`ls`", NONE),
        ("", NONE),
    ],
)
def test_fenced(reply, action):
    assert parse_action(reply, FENCED) == action


@given(st.text(st.sampled_from("`~ \nabsubmit\ud800é"), max_size=60), st.sampled_from(ActionFormat))
def test_any_text_is_an_action(reply, action_format):
    action = parse_action(reply, action_format)
    assert bool(action.command) == (action.kind is ActionKind.COMMAND)
    assert action.ends or action.kind is ActionKind.COMMAND


def test_hostile_length_is_read_in_linear_time():
    reply = "```" * 5000 + "\n" + "~~~x\n" * 5000
    assert parse_action(reply, FENCED).kind in ActionKind
