"""Named places at which a test can kill the process, to prove that nothing is lost there.

`CLAW_CRASH_AT=ledger.commit.before:3` makes the third pass of that point a SIGKILL of the passing process. Unset, a
point costs one dictionary look-up. Every name is listed in `POINTS`; an unknown one is an error, so a test cannot
aim at a point that no longer exists.
"""

import os
import signal

POINTS = frozenset(
    {
        "ledger.capture.before",
        "ledger.capture.after",
        "ledger.bind.before",
        "ledger.bind.after",
        "ledger.judge.before",
        "ledger.judge.after",
        "ledger.eligible.before",
        "ledger.eligible.after",
        "ledger.lease.before",
        "ledger.lease.after",
        "ledger.consume.before",
        "ledger.consume.after",
        "ledger.group.before",
        "ledger.group.after",
        "ledger.trajectory.before",
        "ledger.trajectory.after",
        "ledger.drop.before",
        "ledger.drop.after",
        "ledger.erase.before",
        "ledger.erase.after",
        "ledger.reconcile.before",
        "ledger.reconcile.after",
        "trainer.step.before",
        "trainer.step.after",
        "trainer.checkpoint.before_rename",
        "trainer.checkpoint.after_rename",
        "trainer.publish.before",
        "trainer.publish.after",
        "engine.load.before",
        "engine.load.after",
    }
)

_seen: dict[str, int] = {}


def crash_point(name: str) -> None:
    """Kills this process with SIGKILL if `CLAW_CRASH_AT` names this point and its pass is due."""
    target = os.environ.get("CLAW_CRASH_AT")
    if target is None:
        return
    assert name in POINTS, name
    wanted, _, nth = target.partition(":")
    if wanted not in POINTS:
        raise ValueError(f"CLAW_CRASH_AT names no crash point: {wanted!r}; see claw_train/crash.py")
    if name != wanted:
        return
    _seen[name] = _seen.get(name, 0) + 1
    if _seen[name] >= int(nth or 1):
        os.kill(os.getpid(), signal.SIGKILL)
