"""Which weights the engine server holds, which are newest, and who still uses them.

In: versions as they are loaded, names of weights as replies carry them. Out: how to ask for a version, and the version
of a token. Talks to no server.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from claw_train.errors import EngineError
from claw_train.types import Version, WeightKind, WeightRef

KEPT_ADAPTERS = 2


def served_name(ref: WeightRef) -> str:
    """What these weights are called on a server, `main-0-1-3f9a0c12b4d7`.

    A server may outlive runs and serve several: equal names are the same folder with the same content.
    """
    digest = hashlib.sha256(f"{ref.checksum} {ref.path}".encode()).hexdigest()
    return f"{ref.version}-{digest[:12]}"


@dataclass(frozen=True, slots=True)
class Route:
    """How one request names its weights."""

    version: Version
    adapter: str | None
    """The server's name of a LoRA adapter; None is the server's own weights."""


class ServedVersions:
    """The client's record of one server.

    Args:
        base: names the weights that the server starts with.
        stock: the server is not ours: it calls its first weights as it likes, and does not name adapters in replies.
    """

    def __init__(self, base: Version, *, stock: bool) -> None:
        self.newest = base
        self._own = base
        """The server's own weights: the base, or the full weights loaded last."""
        self._names = {str(base): base}
        if stock:
            self._names["default"] = base
        self._stock = stock
        self._adapters: dict[Version, WeightRef] = {}
        self._full: WeightRef | None = None
        self._sent: dict[str, None] = {}
        """Names of adapters that the server was given and not relieved of, in that order."""
        self._users: Counter[str] = Counter()

    def route(self, wanted: Version | None) -> Route:
        """How to ask for `wanted`; None is the newest.

        Raises:
            EngineError: the server does not hold it.
        """
        version = self.newest if wanted is None else wanted
        if version in self._adapters:
            return Route(version, served_name(self._adapters[version]))
        # every lineage begins with the same base weights
        if version == self._own or (version.step == 0 and self._own.step == 0):
            return Route(version, None)
        held = ", ".join(str(v) for v in (self._own, *self._adapters))
        raise EngineError(f"version {version} is not served; the engine holds {held}")

    def label(self, name: str, route: Route) -> Version:
        """The version behind a name of weights in a reply.

        Raises:
            EngineError: a name that this request cannot have been answered by.
        """
        if route.adapter is not None:
            if name == route.adapter or (self._stock and name in self._names):
                return route.version
            raise EngineError(f"asked adapter {route.adapter}, answered by {name}")
        found = self._names.get(name)
        if found is None:
            raise EngineError(f"the engine answered with weights {name!r}, which this run never loaded")
        return route.version if found.step == 0 else found

    @contextmanager
    def using(self, route: Route) -> Iterator[None]:
        """Marks the adapter as in use, so that it stays loaded."""
        name = route.adapter
        if name is None:
            yield
            return
        self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1

    def announce(self, ref: WeightRef) -> None:
        """`ref` is about to be loaded: the server may hold it, and replies may name it, from now on."""
        if ref.kind is WeightKind.FULL:
            self._names[served_name(ref)] = ref.version
        else:
            self._sent[served_name(ref)] = None

    def loaded(self, ref: WeightRef) -> None:
        """The server holds `ref`; it is the newest."""
        self.announce(ref)
        if ref.kind is WeightKind.LORA:
            self._adapters[ref.version] = ref
        else:
            self._full = ref
            self._own = ref.version
        self.newest = ref.version

    def kept(self) -> list[WeightRef]:
        """What a server that lost everything must be given again, in this order."""
        unused = self.unused()
        adapters = [ref for ref in self._adapters.values() if ref not in unused]
        return ([self._full] if self._full is not None else []) + adapters

    def unused(self) -> list[WeightRef]:
        """Adapters older than those kept that no request uses."""
        old = list(self._adapters.values())[:-KEPT_ADAPTERS]
        return [ref for ref in old if not self._users[served_name(ref)] and ref.version != self.newest]

    def sent(self) -> list[str]:
        """The server's names of all adapters it got from us and may still hold."""
        return list(self._sent)

    def dropped(self, ref: WeightRef) -> None:
        """No request is routed to this adapter any more."""
        self._adapters.pop(ref.version, None)
        self._users.pop(served_name(ref), None)
        self._sent.pop(served_name(ref), None)
