"""Any sequence of calls, reopenings and recoveries: the sum holds and the states are those of a simple model."""

import asyncio
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from claw_train.errors import LedgerError
from claw_train.ledger import DropReason, Ledger, State
from claw_train.ledger.export import iter_turns
from claw_train.types import Turn, TurnId, TurnKind
from tests.ledger.test_moves import LEGAL
from tests.ledger.values import group, scored, state, trajectory, turn

PICK = st.integers(0, 999)
NAMES = st.sampled_from(["bind", "judge", "eligible", "drop"])


class LedgerMachine(RuleBasedStateMachine):
    """The model: the state of each turn, by id."""

    def __init__(self) -> None:
        super().__init__()
        memory = Path("/dev/shm")
        self.run_dir = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
        self.runner = asyncio.Runner()
        self.states: dict[TurnId, State] = {}
        self.turns: dict[TurnId, Turn] = {}
        self.groups = 0
        self.step = 0
        self.ended: set[str] = set()

    @initialize()
    def open(self) -> None:
        self.ledger = self.run(self._open(create=True))

    async def _open(self, *, create: bool) -> Ledger:
        return Ledger.open(self.run_dir, create=create)

    def run(self, call):
        return self.runner.run(call)

    def pick(self, n: int) -> Turn:
        keys = sorted(self.states)
        return self.turns[keys[n % len(keys)]]

    def call(self, call, keys: list[TurnId], new: State | None) -> None:
        """Makes a call that moves `keys` to `new`, or that is refused when `new` is None."""
        if new is None:
            try:
                self.run(call)
            except LedgerError:
                return
            raise AssertionError("an illegal call went through")
        self.run(call)
        self.states.update(dict.fromkeys(keys, new))

    @rule(size=st.integers(1, 2))
    def add_group(self, size: int) -> None:
        self.run(self.ledger.add_group(group(self.groups, size=size)))
        self.groups += 1

    @precondition(lambda self: self.groups)
    @rule(n=PICK, member=st.integers(0, 1), index=st.integers(0, 2), kind=st.sampled_from(TurnKind))
    def capture(self, n: int, member: int, index: int, kind: TurnKind) -> None:
        gid = f"g{n % self.groups}"
        one = turn(f"{gid}-{member}", index, group_id=gid, kind=kind, prompt=(1,) * (index + 1))
        first = {TurnKind.MAIN: State.CAPTURED, TurnKind.SIDE: State.SIDE, TurnKind.EVAL: State.EVAL}[kind]
        known = one.id in self.states
        self.call(self.ledger.capture(one), [one.id], None if known else first)
        self.turns.setdefault(one.id, one)

    @precondition(lambda self: self.states)
    @rule(n=PICK, name=NAMES)
    def move(self, n: int, name: str) -> None:
        one = self.pick(n)
        new = LEGAL[self.states[one.id]].get(name)
        if self.states[one.id] in (State.SIDE, State.EVAL) and name in ("bind", "judge"):
            return  # whether it was bound or judged before is not in the model
        calls = {
            "bind": lambda: self.ledger.bind(one.id, state()),
            "judge": lambda: self.ledger.judge(scored(one)),
            "eligible": lambda: self.ledger.eligible([one.id]),
            "drop": lambda: self.ledger.drop([one.id], DropReason.STALE),
        }
        self.call(calls[name](), [one.id], new)

    @precondition(lambda self: self.states)
    @rule(n=PICK)
    def end_trajectory(self, n: int) -> None:
        session = self.pick(n).id.session
        keys = tuple(k for k in sorted(self.states) if k.session == session)
        ended = trajectory(session, keys, group_id=self.turns[keys[0]].group_id)
        self.call(self.ledger.end_trajectory(ended), [], None if session in self.ended else State.CAPTURED)
        self.ended.add(session)

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        keys = [k for k in sorted(self.states) if self.states[k] is State.ELIGIBLE][:count]
        self.step += 1
        if keys:
            self.call(self.ledger.lease(self.step, keys), keys, State.LEASED)
            self.call(self.ledger.lease(self.step, keys), keys, None)
        self.call(self.ledger.consume(self.step, "c"), keys, State.CONSUMED)
        self.call(self.ledger.consume(self.step, "c"), keys, None)

    @precondition(lambda self: self.states)
    @rule(n=PICK)
    def erase(self, n: int) -> None:
        session = self.pick(n).id.session
        self.call(self.ledger.erase(session), [k for k in self.states if k.session == session], State.ERASED)

    @precondition(lambda self: self.groups)
    @rule(n=PICK)
    def drop_group(self, n: int) -> None:
        gid = f"g{n % self.groups}"
        open_ = {State.CAPTURED, State.BOUND, State.JUDGED, State.ELIGIBLE}
        keys = [k for k, s in self.states.items() if self.turns[k].group_id == gid and s in open_]
        self.call(self.ledger.drop_group(gid, DropReason.STALE), keys, State.DROPPED)

    @rule()
    def reopen(self) -> None:
        before = self.ledger.counts()
        self.run(self.ledger.aclose())
        self.ledger = self.run(self._open(create=False))
        assert self.ledger.counts() == before

    @rule(back=st.integers(0, 2), leased=st.booleans(), rolled_back=st.booleans())
    def recover(self, back: int, leased: bool, rolled_back: bool) -> None:
        """A crash, with a batch under way or not, and a checkpoint that may be older than the last step."""
        keys = [k for k in sorted(self.states) if self.states[k] is State.ELIGIBLE]
        if leased and keys:
            self.run(self.ledger.lease(self.step + 1, keys[:2]))
        before = self.ledger.counts()
        self.run(self.ledger.aclose())
        self.ledger = self.run(self._open(create=False))
        self.step = max(0, self.step - back)
        recovery = self.run(self.ledger.reconcile(self.step, rolled_back=rolled_back))
        after = self.run(self.ledger.audit())
        kept = ("total", "side", "eval", "erased")
        assert [getattr(after, name) for name in kept] == [getattr(before, name) for name in kept]
        assert (after.captured, after.bound, after.judged, after.leased) == (0, 0, 0, 0)
        assert after.eligible == sum(len(c.scored) for c in recovery.complete)
        assert recovery.next_group_index == self.groups
        self.read_back()
        self.ended -= {f"{g.id}-{member}" for g in recovery.reissue for member in range(2)}

    def read_back(self) -> None:
        """After a recovery ids have changed; the model starts from what is stored."""
        stored = list(iter_turns(self.run_dir))
        known = {(k.session, k.index): one for k, one in self.turns.items()}
        self.states = {t.id: t.state for t in stored}
        self.turns = {t.id: t.turn or known[t.id.session, t.id.index] for t in stored}

    @invariant()
    def sums_hold(self) -> None:
        if not hasattr(self, "ledger"):
            return
        counts = self.ledger.counts()
        assert {s: getattr(counts, s) for s in State} == {s: list(self.states.values()).count(s) for s in State}

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.run(self.ledger.audit())
            assert {t.id: t.state for t in iter_turns(self.run_dir)} == self.states
            self.run(self.ledger.aclose())
        self.runner.close()
        shutil.rmtree(self.run_dir)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
