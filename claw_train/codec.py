"""Values to JSON bytes and back, for the ledger, the trainer's socket and the run folder.

pydantic does the work: what comes back was validated against the dataclass. A next state is stored with the name of its
class, and only classes that are already loaded are ever looked up.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from claw_envs.types import NextState
from claw_train.errors import LedgerError

T = TypeVar("T")


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def dump(value: object) -> bytes:
    """One of our frozen dataclasses as JSON; nan and infinity are kept."""
    # pydantic's own JSON writer turns them into null, which no reader of a float accepts.
    plain = _adapter(type(value)).dump_python(value, mode="json")
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode()


def load(kind: type[T], data: bytes | str) -> T:
    """Reads what `dump` wrote.

    Raises:
        LedgerError: `data` does not describe a `kind`.
    """
    try:
        return _adapter(kind).validate_json(data)
    except ValidationError as error:
        raise LedgerError(f"stored {kind.__name__} is unreadable: {error.errors()[0]}") from None


def _known_states(base: type[NextState] = NextState) -> Iterator[type[NextState]]:
    yield base
    for sub in base.__subclasses__():
        yield from _known_states(sub)


def dump_next_state(state: NextState) -> tuple[str, bytes]:
    """(class name, JSON)."""
    return type(state).__name__, dump(state)


def load_next_state(name: str, data: bytes | str) -> NextState:
    """Reads what `dump_next_state` wrote.

    Raises:
        LedgerError: no loaded class has this name, or the data does not fit it.
    """
    kinds = [kind for kind in _known_states() if kind.__name__ == name]
    if kinds:
        # A dataclass with slots is a second class of the same name; the first, a leftover, lives until it is collected.
        return load(kinds[-1], data)
    raise LedgerError(f"next state of unknown class {name!r}: import the environment that made it first")
