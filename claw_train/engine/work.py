"""What one pass does for one request."""

from dataclasses import dataclass

from claw_train.engine.kv import Row
from claw_train.engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Tokens of one request in the flat list of a pass."""

    request: Request
    row: Row
    start: int
    """Of its tokens in the flat list."""
    count: int
    scores: tuple[int, int]
    """Prompt positions [from, to) whose log-probabilities this pass gives."""
    draws: bool
    """Whether the next token can be drawn afterwards."""

    @classmethod
    def plan(cls, request: Request, start: int, count: int) -> "Work":
        """The work on the next `count` tokens of `request`."""
        assert request.row is not None
        end = request.computed + count
        first = request.score_from + 1 + len(request.input_scores)
        last = min(end + 1, len(request.prompt))
        return cls(
            request=request,
            row=request.row,
            start=start,
            count=count,
            scores=(first, max(first, last)),
            draws=end == len(request.tokens) and request.params.max_new_tokens > 0,
        )

    @property
    def positions(self) -> range:
        """Of its tokens in the sequence."""
        return range(self.row.filled, self.row.filled + self.count)

    @property
    def slots(self) -> range:
        """Where its keys go in the pool."""
        return range(self.row.start + self.row.filled, self.row.start + self.row.filled + self.count)

    @property
    def ids(self) -> list[int]:
        """Its tokens."""
        return self.request.tokens[self.row.filled : self.row.filled + self.count]

    @property
    def wanted(self) -> list[int]:
        """Flat indices whose logits are needed."""
        offset = self.start - self.row.filled - 1
        indices = [offset + p for p in range(*self.scores)]
        return [*indices, self.start + self.count - 1] if self.draws else indices
