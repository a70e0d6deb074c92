"""The gate of every built-in task: its oracle earns 1, doing nothing earns 0, three times, in the real sandbox."""

import pytest

from claw_envs.terminal.families import FAMILIES
from claw_envs.terminal.tasks import families_of, make_task
from claw_envs.terminal.words import SPLITS

KINDS = [(family, split) for split in SPLITS for family in families_of(split)]
TIMES = 3


@pytest.mark.sandbox
@pytest.mark.parametrize(("family", "split"), KINDS)
def test_oracle_earns_one_and_nothing_earns_nothing(make, family, split):
    env = make()
    for level in FAMILIES[family].levels:
        task = make_task(family, split, 3, level)
        for _ in range(TIMES):
            env.reset(options={"task_id": task.id})
            for command in task.oracle:
                assert env.step(command)[4]["next_state"].exit_code == 0
            assert env.step("submit")[1] == 1.0
            env.reset(options={"task_id": task.id})
            assert env.step("submit")[1] == 0.0
