"""The ranks behind one handle: `RemoteTrainer`, the main process's `Trainer`. Imports no torch.

In: a `TrainerSpec` and batches. Out: child processes (`training.worker`), one a rank, and their reports. Each rank is
asked over its own local socket, authenticated with a key that exists in two environments only. Any silence, death or
failure of one rank ends them all; `start` brings them back from a checkpoint. Knows no ledger or engine.
"""

import asyncio
import contextlib
import os
import secrets
import shutil
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path

from claw_train import codec
from claw_train.children import Child, ChildSpec, cores
from claw_train.errors import ChildError, GuardError, ModelError, TrainerError
from claw_train.training.folders import next_lineage, private_folder
from claw_train.training.spec import KEY_ENV, Op, Reply, Request, Started, TrainerSpec
from claw_train.types import Batch, StepReport

_STRAGGLER_S = 10.0
"""How long the other ranks may take to fail once one has failed."""


class RemoteTrainer:
    """Implements `protocols.Trainer` with worker processes."""

    def __init__(self, spec: TrainerSpec, *, threads: int | None = None) -> None:
        """Starts nothing yet.

        Args:
            spec: the same for all ranks.
            threads: of all ranks together, shared out equally; the default is all cores. `spec.trainer.threads`, of
                each rank, wins over it.
        """
        self.spec = spec
        self._threads = spec.trainer.threads or max(1, (threads or cores()) // spec.trainer.num_ranks)
        self._ranks: list[_RankHandle] = []
        self._folder: Path | None = None
        self._busy = asyncio.Lock()
        self._starting: asyncio.Task[Started] | None = None
        self._closing = 0
        """Calls of `aclose` in progress."""

    async def start(self, checkpoint: Path | None = None) -> Started:
        """Starts the ranks, after ending earlier ones, from a checkpoint or the base, under a new lineage.

        Raises:
            ConfigError: the checkpoint is not whole or of another model or configuration.
            ModelError: the model folder cannot be loaded.
            ChildError: a rank ended or was not ready in time.
            TrainerError: the ranks failed to start, or the trainer was closed in the meantime.
        """
        if not (Path(self.spec.model_path) / "config.json").is_file():
            raise ModelError(f"model folder {self.spec.model_path} has no config.json: check model.path")
        async with self._busy:
            if self._closing:
                raise TrainerError("the trainer was closed before it started")
            self._starting = asyncio.create_task(self._start(checkpoint))
            try:
                return await self._starting
            except asyncio.CancelledError:
                if self._closing:
                    raise TrainerError("the trainer was closed while it started") from None
                raise
            finally:
                self._starting = None

    async def load(self, checkpoint: Path) -> Started:
        """Goes back to a checkpoint without a restart, under a new lineage; later checkpoints are removed.

        Raises:
            ConfigError: the checkpoint is not whole or of another model or configuration.
            ChildError, TrainerError: the ranks failed; start them again.
        """
        async with self._busy:
            lineage = await asyncio.to_thread(next_lineage, Path(self.spec.run_dir))
            return await self._begin(Op.LOAD, checkpoint, lineage)

    async def step(self, batch: Batch) -> StepReport:
        """One optimizer step, then checkpoint and weights on disk; see `protocols.Trainer`.

        Raises:
            GuardError: non-finite loss or mismatch above the halt level; nothing was written and the ranks live on.
            ChildError: a rank died; carries the end of its log.
            TrainerError: the ranks failed or were silent for `step_timeout_s`; start them again.
        """
        async with self._busy:
            replies = await self._ask(Request(op=Op.STEP, batch=batch), self.spec.trainer.step_timeout_s)
            report = replies[0].report
            if report is None:
                raise TrainerError(f"rank 0 gave no report of step {batch.step}")
            return report

    async def aclose(self) -> None:
        """Ends the ranks at once, also in the middle of a start or a step, which then fail. Idempotent."""
        self._closing += 1
        try:
            if self._starting is not None:
                self._starting.cancel()
            for rank in self._ranks:
                rank.close()
            async with self._busy:
                await self._stop()
        finally:
            self._closing -= 1

    async def _start(self, checkpoint: Path | None) -> Started:
        await self._stop()
        try:
            lineage = await asyncio.to_thread(next_lineage, Path(self.spec.run_dir))
            await self._spawn()
            return await self._begin(Op.INIT, checkpoint, lineage)
        except BaseException:
            await self._stop()
            raise

    async def _begin(self, op: Op, checkpoint: Path | None, lineage: int) -> Started:
        path = str(checkpoint) if checkpoint is not None else None
        request = Request(op=op, checkpoint=path, lineage=lineage)
        replies = await self._ask(request, self.spec.trainer.start_timeout_s)
        started = replies[0].started
        assert started is not None
        return started

    async def _spawn(self) -> None:
        count = self.spec.trainer.num_ranks
        self._folder = private_folder(Path(self.spec.run_dir), self.spec.policy)
        config = self._folder / "spec.json"
        config.write_bytes(codec.dump(self.spec))
        key = secrets.token_bytes(32)
        for rank in range(count):
            address = str(self._folder / f"rank{rank}")
            args = ["--address", address, "--config", str(config), "--rank", str(rank)]
            env = {KEY_ENV: key.hex()}
            if count > 1:
                args += ["--meeting", str(self._folder / "meeting")]
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                env |= {"LOCAL_WORLD_SIZE": str(count), "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
            child = await Child.start(
                ChildSpec(
                    name=f"trainer rank {rank}",
                    module="claw_train.training.worker",
                    args=tuple(args),
                    env=env,
                    log=Path(self.spec.run_dir) / "logs" / f"trainer-{rank}.log",
                    threads=self._threads,
                )
            )
            self._ranks.append(_RankHandle(child, address, key))
        await asyncio.gather(*(rank.connect(self.spec.trainer.start_timeout_s) for rank in self._ranks))

    async def _ask(self, request: Request, timeout_s: float) -> list[Reply]:
        """Puts one request to every rank; the replies in order of rank.

        An error that every rank reports leaves them running; anything else ends them.
        """
        if not self._ranks:
            raise TrainerError("the trainer is not running: start it first")
        try:
            # a batch is megabytes of JSON, and the loop serves live requests meanwhile
            payload = await asyncio.to_thread(codec.dump, request)
            tasks = [asyncio.create_task(rank.ask(payload, timeout_s)) for rank in self._ranks]
            replies = await _all_or_first_failure(tasks)
        except BaseException:
            await self._stop()
            raise
        errors = [error for reply in replies if (error := reply.error()) is not None]
        if not errors:
            return replies
        if len(errors) < len(self._ranks) or not isinstance(errors[0], GuardError):
            await self._stop()
        raise errors[0]

    async def _stop(self) -> None:
        ending = asyncio.create_task(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            # no rank outlives whoever was told to give up; this takes seconds at most
            await ending
            raise

    async def _end(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()
        await asyncio.gather(*(rank.child.stop() for rank in ranks))
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, True)


async def _all_or_first_failure(tasks: "list[asyncio.Task[Reply]]") -> list[Reply]:
    """All replies; once one fails, the rest get a moment to say why too, and the first error in time wins."""
    failed = False
    first: Reply | None = None
    pending = set(tasks)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_STRAGGLER_S if failed else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                assert first is not None
                error = first.error()
                assert error is not None
                raise error
            for task in done:
                reply = task.result()
                if reply.failure is not None and first is None:
                    first, failed = reply, True
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _RankHandle:
    """One child and the connection to it. No thread of ours can be stuck: closing wakes whoever reads or writes."""

    def __init__(self, child: Child, address: str, key: bytes) -> None:
        self.child = child
        self._address = address
        self._key = key
        self._connection: Connection[bytes, bytes] | None = None

    async def connect(self, timeout_s: float) -> None:
        """Waits for the rank's socket.

        Raises:
            ChildError: the rank ended or did not come up in time.
        """

        async def connected() -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    self._connection = await asyncio.to_thread(self._open)
            except (FileNotFoundError, ConnectionRefusedError):
                return False
            return True

        try:
            await self.child.wait_ready(connected, timeout_s=timeout_s)
        except (OSError, EOFError, AuthenticationError) as error:
            raise ChildError(f"{self.child.spec.name} refused its connection: {error}") from error

    def _open(self) -> "Connection[bytes, bytes]":
        return Client(self._address, family="AF_UNIX", authkey=self._key)

    async def ask(self, payload: bytes, timeout_s: float) -> Reply:
        """One request and its reply.

        Raises:
            ChildError: the rank died.
            TrainerError: it was silent for `timeout_s`.
        """
        connection = self._connection
        if connection is None:
            raise TrainerError(f"{self.child.spec.name} was closed before it was asked")
        try:
            async with asyncio.timeout(timeout_s):
                data = await asyncio.to_thread(_exchange, connection, payload)
        except TimeoutError:
            self.close()
            raise TrainerError(f"{self.child.spec.name} was silent for {timeout_s:.0f} s") from None
        except asyncio.CancelledError:
            self.close()
            raise
        except (OSError, EOFError):
            if self._connection is None:
                raise TrainerError(f"{self.child.spec.name} was closed while it worked") from None
            self.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(5.0):
                    await self.child.wait()
            status = self.child.returncode
            raise ChildError(f"{self.child.spec.name} died (status {status}): {self.child.last_words()}") from None
        return codec.load(Reply, data)

    def close(self) -> None:
        """Ends the connection and wakes a thread that waits at it. Idempotent.

        The descriptor itself is freed with the last reference, so a waiting thread never sees it given to another file.
        """
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as twin:
            twin.shutdown(socket.SHUT_RDWR)


def _exchange(connection: "Connection[bytes, bytes]", payload: bytes) -> bytes:
    connection.send_bytes(payload)
    return connection.recv_bytes()
