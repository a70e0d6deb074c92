"""A rank that dies at any point of a step loses at most that step, and the run goes on as if nothing had happened."""

import os
import signal

import pytest

from claw_train.training.folders import latest_checkpoint
from claw_train.training.ranks import Ranks
from claw_train.training.trainer import Trainer


def dies_in_step(trainer: Trainer, batch, point: str) -> bool:
    """Runs the step in a forked copy of this process that is killed at `point`."""
    pid = os.fork()
    if pid == 0:
        os.environ["CLAW_CRASH_AT"] = point
        try:
            trainer.step(batch)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


# newer Pythons warn of forks of processes with threads; the copy runs a single-threaded step and ends
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("point", "survives"),
    [
        ("trainer.step.before", 1),
        ("trainer.step.after", 1),
        ("trainer.checkpoint.before_rename", 1),
        ("trainer.checkpoint.after_rename", 2),
        ("trainer.publish.before", 2),
        ("trainer.publish.after", 2),
    ],
)
@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_kill_loses_at_most_its_own_step(
    kind: str, point: str, survives: int, qwen3, samples, batch_of, spec_of, tmp_path
):
    whole = Trainer(spec_of(qwen3, kind=kind, run_dir=tmp_path / "whole"), Ranks())
    whole.start(None, 0)
    want = [whole.step(batch_of(samples, step)).weights.checksum for step in (1, 2, 3)]

    spec = spec_of(qwen3, kind=kind)
    victim = Trainer(spec, Ranks())
    victim.start(None, 0)
    victim.step(batch_of(samples, 1))
    assert dies_in_step(victim, batch_of(samples, 2), point)

    latest = latest_checkpoint(tmp_path / "run")
    assert latest is not None
    assert latest.step == survives
    heir = Trainer(spec, Ranks())
    begun = heir.start(latest.path, 1)
    assert begun.weights is not None
    assert begun.weights.checksum == want[survives - 1]
    assert heir.step(batch_of(samples, survives + 1)).weights.checksum == want[survives]
    assert not list((tmp_path / "run").rglob(".tmp-*"))
