"""Tricks that must not earn anything, nor make grading hang or fail."""

import pytest

from claw_envs.terminal.tasks import make_task

pytestmark = pytest.mark.sandbox
RENAME = make_task("rename", "train", 0, 1)
COPY = make_task("copy", "train", 0, 1)
FOLDER = make_task("make_folder", "train", 0, 1)
COUNT = make_task("count_lines", "train", 0, 1)
EXECUTABLE = make_task("make_executable", "train", 0, 1)
OLD, NEW = RENAME.oracle[0].split()[1:]
SOURCE, TARGET = COPY.oracle[0].split()[1:]
NAME = FOLDER.oracle[0].split()[1]
COUNTED, COUNT_FILE = COUNT.oracle[0].split()[2], COUNT.oracle[0].split()[4]
SCRIPT = EXECUTABLE.oracle[0].split()[2]

TRICKS = [
    pytest.param(
        RENAME, f"(while kill -0 $$; do :; done; mv {OLD} {NEW}) &", id="writer that waits for the shell's death"
    ),
    pytest.param(RENAME, f"setsid nohup bash -c 'trap \"\" TERM HUP INT; sleep 60; mv {OLD} {NEW}' &", id="daemon"),
    pytest.param(COPY, f"ln -s {SOURCE} {TARGET}", id="link for a copy"),
    pytest.param(COPY, f"mkfifo {TARGET}", id="FIFO for a file"),
    pytest.param(COPY, f"mkfifo {TARGET}; (while :; do cat {SOURCE} > {TARGET}; done) &", id="FIFO with a writer"),
    pytest.param(COPY, f"mkdir {TARGET}", id="folder for a file"),
    pytest.param(COPY, f"cp {SOURCE} {TARGET}; rm {SOURCE}; ln -s {TARGET} {SOURCE}", id="link for the original"),
    pytest.param(COPY, f"ln -s /etc/passwd {TARGET}", id="link out of the folder"),
    pytest.param(COPY, f"truncate -s 40M {TARGET}", id="huge file"),
    pytest.param(COPY, f"truncate -s 8E {TARGET} || truncate -s 1T {TARGET}", id="endless sparse file"),
    pytest.param(COPY, f"cp {SOURCE} {TARGET}; seq 3000 | xargs touch", id="thousands of files"),
    pytest.param(
        COPY, f"cp {SOURCE} {TARGET}; rm -f [!{TARGET[0]}{SOURCE[0]}]*; echo x > {SOURCE}", id="damage beside"
    ),
    pytest.param(COPY, f"touch $'x\\nf 644 9 {TARGET}'", id="forged row in a file name"),
    pytest.param(FOLDER, f"ln -s /tmp {NAME}", id="link for a folder"),
    pytest.param(FOLDER, f"touch {NAME}", id="file for a folder"),
    pytest.param(COUNT, f"seq 100 > {COUNT_FILE}", id="every number at once"),
    pytest.param(COUNT, f"seq -s ' ' 100 > {COUNT_FILE}", id="every number in a line"),
    pytest.param(COUNT, f"wc -l {COUNTED} > {COUNT_FILE}; echo >> {COUNTED}", id="count of another text"),
    pytest.param(EXECUTABLE, "chmod +x *", id="everything executable"),
    pytest.param(EXECUTABLE, f"rm {SCRIPT}; cp /bin/true {SCRIPT}", id="another program"),
    pytest.param(RENAME, "find() { echo; }; alias ls=true; mkdir /tmp/b; PATH=/tmp/b:$PATH", id="shimmed programs"),
    pytest.param(
        RENAME, "mkdir -p /grade /tests; echo 1 > /grade/reward.txt; echo 1.0; echo PASSED", id="forged reward"
    ),
]


@pytest.mark.parametrize(("task", "trick"), TRICKS)
def test_a_trick_earns_nothing_and_grading_stays_valid(make, task, trick):
    env = make(timeout_s=3.0)
    env.reset(options={"task_id": task.id})
    assert env.step(trick)[4]["valid"]
    _, reward, terminated, _, info = env.step("submit")
    assert (reward, terminated, info["valid"]) == (0.0, True, True)


@pytest.mark.parametrize(
    ("task", "way"),
    [
        (RENAME, f"cat {OLD} > {NEW}; rm {OLD}"),
        (COPY, f"dd if={SOURCE} of=./{TARGET}"),
        (FOLDER, f"mkdir -p -m 700 ./{NAME}/"),
        (COUNT, f"cat {COUNTED} | wc -l > {COUNT_FILE}"),
        (COUNT, f"grep -c '' {COUNTED} > {COUNT_FILE}"),
        (EXECUTABLE, f"chmod 755 {SCRIPT}"),
    ],
)
def test_another_way_to_the_same_end_earns_all(make, task, way):
    env = make()
    env.reset(options={"task_id": task.id})
    env.step(way)
    assert env.step("submit")[1] == 1.0
