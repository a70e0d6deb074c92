"""Values as rows and back: token ids, replies, rewards.

A prompt is stored as `shared` leading ids of its parent's prompt and reply, plus a suffix of its own; a first prompt is
stored once by hash and shared by its group. What is read back equals what was captured, bit for bit.
"""

import hashlib
import json
import sqlite3
from collections import OrderedDict
from itertools import groupby
from typing import cast

import numpy as np
from pydantic_core import PydanticSerializationError

from claw_envs.types import NextState
from claw_train.codec import dump, dump_next_state, load, load_next_state
from claw_train.errors import LedgerError
from claw_train.types import (
    Completion,
    Reward,
    Sampling,
    ScoredTurn,
    Turn,
    TurnId,
    TurnKind,
    TurnStatus,
    Version,
)

Ids = tuple[int, ...]
_CACHED_TOKENS = 1_000_000


def pack_ids(ids: Ids) -> bytes:
    """[N] token ids as little-endian unsigned 32-bit numbers."""
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack_ids(data: bytes) -> Ids:
    """Reads `pack_ids`."""
    return cast(Ids, tuple(np.frombuffer(data, dtype="<u4").tolist()))


def pack_versions(versions: tuple[Version, ...]) -> str:
    """[T] versions as runs: `[["policy-0-3", 17], ...]`."""
    return json.dumps([[str(version), len(list(run))] for version, run in groupby(versions)])


def unpack_versions(data: str) -> tuple[Version, ...]:
    """Reads `pack_versions`."""
    runs = cast(list[tuple[str, int]], json.loads(data))
    return tuple(version for text, n in runs for version in (Version.parse(text),) * n)


def shared_length(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix; compares slices because that runs in C."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def encode_completion(completion: Completion) -> dict[str, object]:
    """The reply's columns.

    Raises:
        LedgerError: a token id, a log-probability or the text cannot be stored.
    """
    try:
        return {
            "version": str(completion.versions[0]) if completion.versions else None,
            "reply": pack_ids(completion.token_ids),
            "logprobs": np.asarray(completion.logprobs, dtype="<f8").tobytes(),
            "versions": pack_versions(completion.versions),
            "finish": completion.finish_reason,
            "sampling": dump(completion.sampling),
            "text": completion.text.encode("utf-8", "surrogatepass"),
        }
    except (ValueError, OverflowError, TypeError) as error:
        raise LedgerError(f"a reply cannot be stored: {error}") from error


def encode_next_state(state: NextState) -> tuple[str, bytes]:
    """(class, JSON).

    Raises:
        LedgerError: it holds something that is not JSON or not valid Unicode.
    """
    try:
        return dump_next_state(state)
    except (PydanticSerializationError, ValueError) as error:
        raise LedgerError(f"a next state cannot be stored: {error}") from error


def encode_scored(scored: ScoredTurn) -> tuple[bytes, str]:
    """(reward, hints) as JSON.

    Raises:
        LedgerError: the judge's words are not valid Unicode.
    """
    try:
        return dump(scored.reward), json.dumps(scored.hints)
    except (PydanticSerializationError, ValueError) as error:
        raise LedgerError(f"a reward cannot be stored: {error}") from error


def turn_id(row: sqlite3.Row) -> TurnId:
    """The key of a row of `turns`."""
    return TurnId(row["stream"], row["session"], row["idx"], row["attempt"])


class Contexts:
    """Prompts from rows, and prompt + reply of the turns used last, so that a long session is not walked each time."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._cache: OrderedDict[int, Ids] = OrderedDict()
        self._tokens = 0

    def keep(self, row: int, context: Ids) -> None:
        """Remembers prompt + reply of a stored turn."""
        self._tokens += len(context) - len(self._cache.pop(row, ()))
        self._cache[row] = context
        while self._tokens > _CACHED_TOKENS and len(self._cache) > 1:
            self._tokens -= len(self._cache.popitem(last=False)[1])

    def forget(self) -> None:
        """Empties the cache: after an erasure nothing of it may stay."""
        self._cache.clear()
        self._tokens = 0

    def prompt(self, row: sqlite3.Row) -> Ids:
        """[P] of a row of `turns`.

        Raises:
            LedgerError: a row it is built on is missing.
        """
        chain: list[sqlite3.Row] = [row]
        base: Ids = ()
        while (parent := chain[-1]["parent"]) is not None:
            if (kept := self._cache.get(parent)) is not None:
                base = kept
                break
            chain.append(self._link(parent))
        else:
            base = self._first(chain[-1]["prompt"])
        while len(chain) > 1:
            link = chain.pop()
            base = base[: link["shared"]] + unpack_ids(link["suffix"]) + unpack_ids(link["reply"])
            self.keep(link["row"], base)
        return base[: row["shared"]] + unpack_ids(row["suffix"])

    def context(self, row: int) -> Ids:
        """Prompt + reply of the stored turn `row`."""
        if (kept := self._cache.get(row)) is not None:
            self._cache.move_to_end(row)
            return kept
        link = self._link(row)
        context = self.prompt(link) + unpack_ids(link["reply"])
        self.keep(row, context)
        return context

    def _link(self, row: int) -> sqlite3.Row:
        found = self._connection.execute(
            "SELECT row, parent, prompt, shared, suffix, reply FROM turns WHERE row = ?", (row,)
        ).fetchone()
        if found is None or found["suffix"] is None:
            raise LedgerError(f"turn row {row} is missing or erased but another prompt is built on it")
        return found

    def _first(self, prompt: int | None) -> Ids:
        if prompt is None:
            raise LedgerError("a first prompt is missing")
        return unpack_ids(self._connection.execute("SELECT ids FROM prompts WHERE row = ?", (prompt,)).fetchone()[0])


def prompt_hash(ids: bytes) -> bytes:
    """Names a stored first prompt."""
    return hashlib.sha256(ids).digest()


def decode_turn(row: sqlite3.Row, contexts: Contexts) -> Turn:
    """The turn of a whole row of `turns` that is not erased.

    Raises:
        LedgerError: the row is unreadable.
    """
    completion = Completion(
        token_ids=unpack_ids(row["reply"]),
        logprobs=tuple(np.frombuffer(row["logprobs"], dtype="<f8").tolist()),
        versions=unpack_versions(row["versions"]),
        finish_reason=row["finish"],
        sampling=load(Sampling, row["sampling"]),
        text=row["text"].decode("utf-8", "surrogatepass"),
    )
    return Turn(
        id=turn_id(row),
        policy=row["policy"],
        kind=TurnKind(row["kind"]),
        prompt_ids=contexts.prompt(row),
        completion=completion,
        status=TurnStatus(row["status"]),
        group_id=row["group_id"],
        task_id=row["task_id"],
        next_state=decode_next_state(row),
    )


def decode_next_state(row: sqlite3.Row) -> NextState | None:
    """None where it is not known."""
    return None if row["next_class"] is None else load_next_state(row["next_class"], row["next_state"])


def decode_reward(row: sqlite3.Row) -> Reward | None:
    """None where the turn was not judged."""
    return None if row["reward"] is None else load(Reward, row["reward"])


def decode_hints(row: sqlite3.Row) -> tuple[str, ...]:
    """Empty where there are none."""
    return () if row["hints"] is None else tuple(cast(list[str], json.loads(row["hints"])))


def decode_scored(row: sqlite3.Row, contexts: Contexts) -> ScoredTurn:
    """The turn with its reward.

    Raises:
        LedgerError: it was never judged.
    """
    reward = decode_reward(row)
    if reward is None:
        raise LedgerError(f"turn {turn_id(row)} has no reward")
    return ScoredTurn(turn=decode_turn(row, contexts), reward=reward, hints=decode_hints(row))
