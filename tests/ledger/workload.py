"""A small deterministic run over the ledger, and a server that plays it in child processes and kills them.

The run: groups of two episodes of two turns; replies depend on the group's seed alone; group 2 is constant (left
out of its batch), group 5 is useless (dropped), episode 1 of group 4 loses its world, every third reply is cut. Two
usable groups a step; a "checkpoint" is a file that
holds the step and a hash over everything trained on so far, so it plays the part of the loss trace.
"""

import asyncio
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from claw_envs.types import TerminalState
from claw_train.codec import dump, load
from claw_train.crash import crash_point
from claw_train.ledger import CompleteGroup, DropReason, GroupRecord, Ledger
from claw_train.ledger.records import RecordWriter
from claw_train.types import Reward, Sampling, ScoredTurn, Trajectory, TurnStatus, Version
from tests.ledger.values import FAILED, PLUS, group, scored, state, trajectory, turn

STEPS, GROUPS_PER_STEP, SIZE, TURNS = 3, 2, 2, 2


class Run:
    """One process's share of the run."""

    def __init__(self, run_dir: Path, progress: Callable[[], object]) -> None:
        self.run_dir = run_dir
        self.progress = progress
        self.ledger = Ledger.open(run_dir, create=not Ledger.exists(run_dir))
        self.records = RecordWriter(run_dir, lambda ids: " ".join(map(str, ids)))

    async def go(self) -> None:
        done, trace = self.checkpoint()
        recovery = await self.ledger.reconcile(done)
        await self.ledger.audit()
        waiting: list[tuple[GroupRecord, CompleteGroup | None]] = [(c.record, c) for c in recovery.complete]
        waiting = sorted([*waiting, *((r, None) for r in recovery.reissue)], key=lambda w: w[0].index)
        fresh = recovery.next_group_index
        for step in range(done + 1, STEPS + 1):
            usable: list[CompleteGroup] = []
            while len(usable) < GROUPS_PER_STEP:
                need = GROUPS_PER_STEP - len(usable)
                wave, waiting = waiting[:need], waiting[need:]
                while len(wave) < need:
                    wave.append((group(fresh, size=SIZE), None))
                    fresh += 1
                played = await asyncio.gather(*(self.play(r) if c is None else self.given(c) for r, c in wave))
                for complete in played:
                    if await self.settle(complete):
                        usable.append(complete)
            trace = await self.train(step, usable, trace)
            self.records.catch_up()
        await self.ledger.audit()
        await self.ledger.aclose()
        self.records.catch_up()
        self.records.close()

    async def given(self, complete: CompleteGroup) -> CompleteGroup:
        return complete

    async def play(self, record: GroupRecord) -> CompleteGroup:
        if record.attempt == 0:
            await self.ledger.add_group(record)
            self.progress()
        done = await asyncio.gather(*(self.episode(record, member) for member in range(record.size)))
        return CompleteGroup(
            record=record, trajectories=tuple(t for t, _ in done), scored=tuple(s for _, turns in done for s in turns)
        )

    async def episode(self, record: GroupRecord, member: int) -> tuple[Trajectory, list[ScoredTurn]]:
        session = f"{record.id}-{member}"
        prompt = (record.index + 10, 11, 12)
        lost = record.index == 4 and member == 1
        results: list[ScoredTurn] = []
        for index in range(TURNS):
            digest = hashlib.sha256(f"{record.seed}/{member}/{index}".encode()).digest()
            cut = digest[0] % 3 == 0
            one = turn(
                session,
                index,
                group_id=record.id,
                attempt=record.attempt,
                prompt=prompt,
                reply=tuple(digest[:5]),
                version=Version("main", 0, record.index // 2),
                status=TurnStatus.CUT if cut else TurnStatus.OK,
                text=digest.hex()[:8],
            )
            await self.ledger.capture(one)
            self.progress()
            if lost and index == 1:
                await self.ledger.drop([one.id], DropReason.INFRA_ERROR)
                self.progress()
                break
            await self.ledger.bind(one.id, state(digest.hex()))
            self.progress()
            verdict = scored(one, FAILED if cut or digest[1] % 5 == 0 else PLUS)
            await self.ledger.judge(verdict)
            self.progress()
            results.append(verdict)
            prompt = (*one.prompt_ids, *one.completion.token_ids, 13, digest[2])
        ended = trajectory(session, tuple(s.turn.id for s in results), group_id=record.id, failed=lost)
        await self.ledger.end_trajectory(ended)
        self.progress()
        return ended, results

    async def settle(self, complete: CompleteGroup) -> bool:
        keys = [s.turn.id for s in complete.scored]
        await self.ledger.eligible(keys)
        self.progress()
        if complete.record.index == 5:
            await self.ledger.drop(keys, DropReason.STALE)
            self.progress()
        return complete.record.index != 5

    async def train(self, step: int, groups: list[CompleteGroup], trace: str) -> str:
        turns = [s for complete in groups for s in sorted(complete.scored, key=lambda s: s.turn.id)]
        constant = [s.turn.id for s in turns if s.turn.group_id == "g2"]
        cut = [s.turn.id for s in turns if s.turn.status is TurnStatus.CUT and s.turn.id not in constant]
        for keys, reason in ((constant, DropReason.NO_SIGNAL), (cut, DropReason.CUT)):
            if keys:
                await self.ledger.drop(keys, reason, step=step)
                self.progress()
        batch = [s for s in turns if s.turn.id not in {*constant, *cut}]
        await self.ledger.lease(step, [s.turn.id for s in batch])
        self.progress()
        # What a loss depends on: the batch, and every judged turn of its groups (baselines), dropped ones included.
        seen = [(s.turn.id.session, s.turn.id.index, s.turn.completion.token_ids, s.reward.value) for s in turns]
        trace = hashlib.sha256(f"{trace}/{step}/{seen}/{[s.turn.id.index for s in batch]}".encode()).hexdigest()
        self.save(step, trace)
        self.progress()
        await self.ledger.consume(step, f"checkpoint-{step}", {"loss": 1.0 / step})
        self.progress()
        return trace

    def save(self, step: int, trace: str) -> None:
        path = self.run_dir / f"checkpoint-{step}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps([step, trace]))
        crash_point("trainer.checkpoint.before_rename")
        new.rename(path)
        crash_point("trainer.checkpoint.after_rename")

    def checkpoint(self) -> tuple[int, str]:
        found = [json.loads(path.read_text()) for path in self.run_dir.glob("checkpoint-*.json")]
        step, trace = max(found, default=[0, ""])
        return step, trace


async def hold(run_dir: Path, ready: Callable[[], object]) -> None:
    """Opens a ledger and keeps it."""
    ledger = Ledger.open(run_dir, create=True)
    ready()
    await asyncio.Event().wait()
    await ledger.aclose()


async def run(run_dir: Path, progress: Callable[[], object]) -> None:
    await Run(run_dir, progress).go()


async def erase(run_dir: Path, _: Callable[[], object]) -> None:
    """Erases one session of a finished run."""
    async with Ledger.open(run_dir, create=False) as ledger:
        await ledger.erase("g0-0")


WORK = {"run": run, "hold": hold, "erase": erase}


def _child(job: dict[str, str], pipe: int) -> None:
    if job["crash_at"]:
        os.environ["CLAW_CRASH_AT"] = job["crash_at"]
    asyncio.run(WORK[job["work"]](Path(job["run_dir"]), lambda: os.write(pipe, b".")))
    os._exit(0)


def serve() -> None:
    """Jobs on stdin, one JSON a line; answers on stdout: how the child ended.

    `kill_after` kills it with SIGKILL after that many committed operations, wherever it is by then.
    """
    load(TerminalState, dump(state()))  # pydantic's schemas are built once here, not in every child
    load(Sampling, dump(turn().completion.sampling))
    load(Reward, dump(PLUS))
    for line in sys.stdin:
        job = json.loads(line)
        get, put = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(get)
            try:
                _child(job, put)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
        os.close(put)
        seen = 0
        while seen < job["kill_after"] and (data := os.read(get, 1)):
            seen += len(data)
        if job["kill_after"] and seen >= job["kill_after"]:
            if job["work"] == "hold":
                print(json.dumps({"pid": pid}), flush=True)
                sys.stdin.readline()
            os.kill(pid, signal.SIGKILL)
        while os.read(get, 4096):
            pass
        os.close(get)
        print(json.dumps({"exit": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "pid": pid}), flush=True)


if __name__ == "__main__":
    serve()
