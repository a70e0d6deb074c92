"""The seams: everything one part may use of another. Each has a real implementation and a shipped fake."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from claw_train.types import (
    Batch,
    Completion,
    GenerateRequest,
    ScoredTurn,
    StepReport,
    TokenScores,
    Turn,
    Version,
    WeightRef,
)


class Engine(Protocol):
    """Samples and scores tokens over HTTP. Implemented once, by `serving.client`."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Samples one reply; retries transient failures with the same request id.

        Cancelling the call aborts the request on the server.

        Raises:
            EngineError: after the last retry.
        """
        ...

    async def score(
        self,
        prompt_ids: tuple[int, ...],
        token_ids: tuple[int, ...],
        *,
        version: Version | None = None,
        top_k: int = 0,
    ) -> TokenScores:
        """Log-probabilities (temperature 1) of `token_ids` [T] after `prompt_ids`.

        Raises:
            EngineError: after the last retry.
        """
        ...

    async def load_weights(self, ref: WeightRef) -> None:
        """Makes `ref` the newest version without dropping a request; verified before it returns.

        Raises:
            EngineError: the weights were not taken over.
        """
        ...

    async def aclose(self) -> None:
        """Closes connections; the server is not stopped."""
        ...


class Judge(Protocol):
    """Scores one turn by its next state."""

    async def score(self, turn: Turn, history: tuple[Turn, ...]) -> ScoredTurn:
        """Returns a reward or an abstention; `history` holds the session's earlier turns.

        Raises:
            JudgeError: no verdict; the caller records why and no score is made up.
        """
        ...


class Renderer(Protocol):
    """Turns conversations into token ids without ever tokenising a reply again. Implemented by `serving.render`."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""
        ...

    def start(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Ids [P] of a conversation's beginning, ready for a reply."""
        ...

    def extend(
        self, prompt_ids: Sequence[int], reply_ids: Sequence[int], messages: Sequence[Mapping[str, str]]
    ) -> tuple[int, ...]:
        """Ids of the next prompt; they begin with `prompt_ids + reply_ids` exactly."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, for people."""
        ...


class Trainer(Protocol):
    """The ranks behind one handle."""

    async def step(self, batch: Batch) -> StepReport:
        """One optimizer step, then checkpoint (fsynced, renamed) and weights on disk.

        Raises:
            GuardError: non-finite loss or mismatch above the halt level; nothing was written.
            TrainerError: the ranks failed.
        """
        ...

    async def aclose(self) -> None:
        """Ends the ranks."""
        ...
