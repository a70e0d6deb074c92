"""A rank as a process: `python -m claw_train.training.worker --address SOCKET --config FILE --rank R`.

In: requests as JSON over one authenticated connection to a local socket; RANK, WORLD_SIZE and LOCAL_RANK as torchrun
sets them. Out: one reply for each. Between requests the rank waits at the socket, never in a collective. It ends when
the connection closes or its parent is gone. Knows nothing of the run beyond its `TrainerSpec`.
"""

import argparse
import contextlib
import logging
import os
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from claw_train import codec
from claw_train.children import watch_parent
from claw_train.errors import ClawTrainError, TrainerError, boundary
from claw_train.log import setup_logging
from claw_train.training.spec import KEY_ENV, Op, Reply, Request, TrainerSpec

if TYPE_CHECKING:
    from claw_train.training.trainer import Trainer

logger = logging.getLogger(__name__)


def main() -> None:
    """Serves one connection, then ends."""
    watch_parent()
    setup_logging()
    parser = argparse.ArgumentParser(description="One rank of the trainer; started by the main process.")
    parser.add_argument("--address", required=True, help="path of the socket to listen at")
    parser.add_argument("--config", required=True, type=Path, help="TrainerSpec as JSON")
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--meeting", type=Path, help="file by which several ranks find one another")
    args = parser.parse_args()
    # taken out of the environment, so that nothing this process starts can read it
    key = bytes.fromhex(os.environ.pop(KEY_ENV))
    spec = codec.load(TrainerSpec, args.config.read_bytes())
    with Listener(args.address, family="AF_UNIX", authkey=key) as listener, listener.accept() as connection:
        _serve(connection, _Rank(spec, args.meeting))


class _Rank:
    """Answers requests; builds the trainer at the first INIT, so that the socket is up before torch is."""

    def __init__(self, spec: TrainerSpec, meeting: Path | None) -> None:
        self._spec = spec
        self._meeting = meeting
        self._trainer: Trainer | None = None

    def answer(self, request: Request) -> Reply:
        try:
            with boundary(TrainerError, f"trainer failed at {request.op}"):
                return self._answer(request)
        except ClawTrainError as error:
            logger.error("%s: %s", request.op, error)
            return Reply.of(error)

    def _answer(self, request: Request) -> Reply:
        if request.op is Op.INIT:
            self._trainer = self._build()
        if self._trainer is None:
            raise TrainerError(f"{request.op} before init")
        if request.op is Op.STEP:
            assert request.batch is not None
            return Reply(report=self._trainer.step(request.batch))
        checkpoint = Path(request.checkpoint) if request.checkpoint is not None else None
        return Reply(started=self._trainer.start(checkpoint, request.lineage))

    def _build(self) -> "Trainer":
        # torch takes seconds to import and must find its thread settings in the environment
        from transformers.utils import logging as transformers_logging

        from claw_train.training.ranks import Ranks
        from claw_train.training.trainer import Trainer

        transformers_logging.disable_progress_bar()
        return Trainer(self._spec, Ranks(self._meeting, self._spec.trainer.step_timeout_s))


def _serve(connection: "Connection[bytes, bytes]", rank: _Rank) -> None:
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request = codec.load(Request, connection.recv_bytes())
            connection.send_bytes(codec.dump(rank.answer(request)))


if __name__ == "__main__":
    main()
