"""The environment on the real sandbox."""

import threading
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest

from claw_envs.errors import TaskError
from claw_envs.terminal.tasks import make_task
from claw_envs.testing import check_claw_env
from claw_envs.types import Role

pytestmark = pytest.mark.sandbox
TASK = make_task("rename", "train", 0, 1)
OPTIONS = {"task_id": TASK.id}


def fenced(marker: str) -> str:
    return f"```\n: {marker}\n```"


def test_holds_the_rules():
    check_claw_env(gymnasium.make("ClawTerminal-v0"))


def test_holds_the_rules_with_fenced_replies_and_ansi():
    env = gymnasium.make("ClawTerminal-v0", action_format="fenced", max_turns=3, levels=[2], render_mode="ansi")
    check_claw_env(env, silent_reply=fenced)


def test_solving_and_submitting_ends_with_one(make):
    env = make()
    env.reset(options=OPTIONS)
    assert env.step(TASK.oracle[0])[1:4] == (0.0, False, False)
    obs, reward, terminated, truncated, info = env.step("submit")
    assert (reward, terminated, truncated, info["valid"]) == (1.0, True, False, True)
    assert (obs["command"], obs["is_error"]) == (1, 0)


def test_a_command_and_submit_in_one_reply_are_both_done(make):
    env = make()
    env.reset(options=OPTIONS)
    assert env.step(TASK.oracle[0] + "\nsubmit")[1:4] == (1.0, True, False)


def test_a_reply_without_a_command_is_a_declared_end_and_graded(make):
    env = make(action_format="fenced")
    env.reset(options=OPTIONS)
    env.step(f"```\n{TASK.oracle[0]}\n```")
    _, reward, terminated, truncated, info = env.step("All done!")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert not info["next_state"].command


def test_the_turn_limit_grades_and_truncates(make):
    env = make(max_turns=1)
    env.reset(options=OPTIONS)
    assert env.step(TASK.oracle[0])[1:4] == (1.0, False, True)
    env.reset(options=OPTIONS)
    assert env.step("ls")[1:4] == (0.0, False, True)


def test_submitting_in_the_last_turn_is_a_termination(make):
    env = make(max_turns=1)
    env.reset(options=OPTIONS)
    assert env.step("submit")[1:4] == (0.0, True, False)


def test_one_turn_episodes_say_which_checks_newly_pass(make):
    env = make(max_turns=1)
    env.reset(options=OPTIONS)
    new = env.step(TASK.oracle[0])[4]["next_state"].newly_passed
    assert new == ("renamed",)
    env.reset(options=OPTIONS)
    assert env.step(f"{TASK.oracle[0]}; touch stray")[4]["next_state"].newly_passed == ()
    env.reset(options=OPTIONS)
    assert env.step("rm *")[4]["next_state"].newly_passed == ()


def test_later_turns_do_not_guess_what_newly_passes(make):
    env = make(max_turns=2)
    env.reset(options=OPTIONS)
    assert env.step(TASK.oracle[0])[4]["next_state"].newly_passed is None
    assert env.step("ls")[4]["next_state"].newly_passed is None


def test_the_shell_persists_and_the_state_is_typed(make):
    env = make()
    obs, info = env.reset(options=OPTIONS)
    assert obs["instruction"] == TASK.instruction == obs["text"] == env.unwrapped.render_next_state()
    assert (info["next_state"].role, obs["cwd"]) == (Role.USER, "/work")
    env.step("mkdir sub; cd sub; X=7")
    obs, *_, info = env.step("echo $X; echo bad >&2; false")
    state = info["next_state"]
    assert (state.stdout, state.stderr, state.exit_code, state.cwd) == ("7\n", "bad\n", 1, "/work/sub")
    assert (state.role, state.is_error, state.command) == (Role.TERMINAL, True, True)
    assert obs["text"] == env.unwrapped.render_next_state() == "7\nbad\n[exit code 1]"


def test_a_slow_command_is_killed_and_the_episode_goes_on(make):
    env = make(timeout_s=0.3)
    env.reset(options=OPTIONS)
    obs, _, terminated, truncated, info = env.step("echo start; sleep 60")
    assert (obs["timed_out"], obs["exit_code"], obs["stdout"]) == (1, -1, "start\n")
    assert (terminated, truncated, info["valid"]) == (False, False, True)
    assert env.step("echo alive")[0]["stdout"] == "alive\n"


@pytest.mark.parametrize(
    "command",
    [
        "printf '\\xff\\xfe\\x00\\x1b[2J\\x1b]0;t\\x07'",
        "printf 'é日本\\r\\n'",
        "yes",
        "head -c 3000000 /dev/urandom",
        "echo {'\"'; ((",
        "exit 3",
        "exec ls",
        "kill -9 $$",
        "cat",
        "mkdir \"$(printf 'a\\nb')\"; ls",
        "cd /; rm -rf /work/* 2>&1",
        ":(){ :|:& };:",
    ],
)
def test_hostile_commands_leave_a_sound_observation(make, command):
    env = make(timeout_s=1.0)
    env.reset(options=OPTIONS)
    step = env.step(command)
    assert step[0] in env.observation_space
    assert step[4]["valid"]
    last = env.step("submit")
    assert last[1:4] == (0.0, True, False)
    assert last[4]["valid"]


def test_unicode_goes_in_and_out(make):
    env = make()
    env.reset(options=OPTIONS)
    assert env.step("echo 'größe 日本 🙂'")[0]["stdout"] == "größe 日本 🙂\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"nosuch": 1}, "nosuch"),
        ({"split": "test"}, "test"),
        ({"family": "nosuch"}, "nosuch"),
        ({"level": 7}, "7"),
        ({"task_id": "x"}, "x"),
        ({"task_id": 3}, "3"),
        ({"task_id": TASK.id, "split": "eval"}, "split"),
        ({"family": "join_files", "split": "train"}, "join_files"),
    ],
)
def test_a_wrong_option_is_refused_by_name(make, options, named):
    with pytest.raises(TaskError, match=named):
        make().reset(options=options)


def test_options_choose_split_family_and_level(make):
    env = make(families=["rename", "copy"])
    for seed in range(6):
        assert env.reset(seed=seed)[1]["task_id"].split("/")[:2] in (["rename", "train"], ["copy", "train"])
        assert env.reset(seed=seed, options={"split": "eval"})[1]["task_id"].split("/")[1] == "eval"
    assert env.reset(options={"family": "delete", "level": 2})[1]["task_id"].startswith("delete/train/")
    assert env.reset(options={"split": "heldout"})[1]["task_id"].split("/")[1] == "heldout"


def test_a_seed_names_one_task_whatever_came_before(make):
    one, two = make(), make()
    two.reset(seed=1)
    assert one.reset(seed=5)[1]["task_id"] == two.reset(seed=5)[1]["task_id"]
    assert len({one.reset(seed=seed)[1]["task_id"] for seed in range(8)}) > 4


def test_two_environments_do_not_see_one_another(make):
    one, two = make(), make()
    one.reset(options=OPTIONS)
    two.reset(options=OPTIONS)
    one.step("echo secret > here.txt; cd /tmp; Y=1")
    assert "here.txt" not in two.step("ls; echo $Y")[0]["stdout"]
    assert two.step("pwd")[0]["stdout"] == "/work\n"
    one.close()
    assert two.step("echo on")[0]["stdout"] == "on\n"


def test_sixteen_environments_on_threads(make):
    envs = [make() for _ in range(16)]
    together = threading.Barrier(len(envs), timeout=60)

    def play(n: int) -> tuple[float, str]:
        envs[n].reset(options=OPTIONS)
        together.wait()
        said = envs[n].step(f"echo {n}; {TASK.oracle[0]}")[0]["stdout"]
        return envs[n].step("submit")[1], said

    with ThreadPoolExecutor(len(envs)) as threads:
        assert list(threads.map(play, range(16))) == [(1.0, f"{n}\n") for n in range(16)]


def test_the_loop_of_the_readme():
    import claw_envs  # noqa: F401

    env = gymnasium.make("ClawTerminal-v0")
    obs, info = env.reset(seed=7)
    print(obs["instruction"])
    done = False
    while not done:
        action = "ls -la"  # ask a model here
        obs, reward, terminated, truncated, info = env.step(action)
        print(obs["text"])
        done = terminated or truncated
    env.close()
    assert (reward, truncated, info["valid"]) == (0.0, True, True)


def test_ansi_shows_the_episode(make):
    env = make(render_mode="ansi")
    env.reset(options=OPTIONS)
    env.step("echo hi")
    assert env.render() == f"{TASK.instruction}\n$ echo hi\nhi"
    assert env.render() == env.render()


def test_the_prompt_is_the_same_for_every_task(make):
    env = make(action_format="fenced", examples=2)
    env.reset(seed=1)
    before = (env.unwrapped.system_prompt, env.unwrapped.example_messages, env.unwrapped.tools)
    env.reset(seed=2)
    assert before == (env.unwrapped.system_prompt, env.unwrapped.example_messages, env.unwrapped.tools)
    assert [m["role"] for m in before[1]] == ["user", "assistant"] * 2
    assert all(m["content"].startswith("```\n") for m in before[1][1::2])
