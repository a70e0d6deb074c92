"""What a grader sees: the working folder as it stands after the agent's processes are dead.

In: a frozen sandbox. Out: a `Tree` of entries, with contents read on demand. Links are entries of their own and are
never followed. Whatever an agent can do to the folder (a million files, a FIFO, an endless file) yields a tree in which
nothing passes; only the sandbox itself can make grading invalid. Knows no task.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from claw_envs.errors import GraderError
from claw_envs.sandbox.base import WORKDIR, Sandbox

MAX_LISTING = 12 * 1024
"""Bytes of listing that are looked at; a longer one is no solution of any task."""
MAX_FILE = 64 * 1024
"""Bytes; a longer file is no solution of any task."""
_TIMEOUT_S = 30.0
_LIST = f"find {WORKDIR} -mindepth 1 -maxdepth 5 -printf '%y %m %s %P\\0' | head -c {MAX_LISTING}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name in the working folder."""

    kind: str
    """`f` regular file, `d` folder, `l` link, `p` FIFO, ... as `find -printf %y` says."""
    mode: int
    """Permission bits."""
    size: int
    """Bytes."""


@dataclass(kw_only=True)
class Tree:
    """The end state; paths are relative to the working folder, without a trailing `/`."""

    entries: Mapping[str, Entry]
    complete: bool = True
    """False when there was more than a grader looks at; then every check fails."""
    sandbox: Sandbox | None = field(default=None, repr=False)
    _texts: dict[str, str | None] = field(default_factory=dict[str, str | None], repr=False)

    @classmethod
    def of_start(cls, files: Mapping[str, str], modes: Mapping[str, int]) -> "Tree":
        """The tree of a start state, without a sandbox."""
        entries = {path: Entry(kind="d", mode=0o755, size=0) for path in _parents(files)}
        for path, text in files.items():
            kind, default = ("d", 0o755) if path.endswith("/") else ("f", 0o644)
            entries[path.rstrip("/")] = Entry(kind=kind, mode=modes.get(path, default), size=len(text.encode()))
        return cls(entries=entries, _texts={path: text for path, text in files.items() if not path.endswith("/")})

    def is_file(self, path: str) -> bool:
        """True for a regular file, not a link to one."""
        entry = self.entries.get(path)
        return entry is not None and entry.kind == "f"

    def is_folder(self, path: str) -> bool:
        """True for a folder, not a link to one."""
        entry = self.entries.get(path)
        return entry is not None and entry.kind == "d"

    def mode(self, path: str) -> int | None:
        """Permission bits; None when there is no such entry."""
        entry = self.entries.get(path)
        return None if entry is None else entry.mode

    def text(self, path: str) -> str | None:
        """Contents of a regular file; None when it is none, longer than `MAX_FILE` or not UTF-8."""
        if path not in self._texts:
            self._texts[path] = self._read(path)
        return self._texts[path]

    def _read(self, path: str) -> str | None:
        if self.sandbox is None or not self.is_file(path) or self.entries[path].size > MAX_FILE:
            return None
        try:
            data = self.sandbox.read(f"{WORKDIR}/{path}", max_bytes=MAX_FILE)
            return None if data is None else data.decode()
        except ValueError:  # longer than max_bytes, or not UTF-8
            return None

    def lines(self, path: str) -> list[str] | None:
        """Lines of a file, without a trailing empty one; None as in `text`."""
        text = self.text(path)
        return None if text is None else text.removesuffix("\n").split("\n")

    def unchanged(
        self, files: Mapping[str, str], *, modes: Mapping[str, int] | None = None, but: Collection[str] = ()
    ) -> bool:
        """True when start files outside `but` are as they were and no entry outside `but` was added.

        Args:
            files: start files (path -> text; a folder ends in `/`).
            modes: their permission bits where not the usual ones.
            but: paths (no trailing `/`) that the task itself creates, changes or removes.
        """
        start = Tree.of_start(files, modes or {})
        if not self.complete or any(path not in start.entries and path not in but for path in self.entries):
            return False
        return all(self._same(path, start) for path in start.entries if path not in but)

    def _same(self, path: str, start: "Tree") -> bool:
        now, then = self.entries.get(path), start.entries[path]
        if now is None or (now.kind, now.mode) != (then.kind, then.mode):
            return False
        return then.kind != "f" or self.text(path) == start.text(path)


def _parents(files: Iterable[str]) -> Iterable[str]:
    for path in files:
        parts = path.rstrip("/").split("/")
        yield from ("/".join(parts[:n]) for n in range(1, len(parts)))


def snapshot(sandbox: Sandbox) -> Tree:
    """Lists the working folder of a frozen sandbox.

    Raises:
        SandboxLost: the sandbox is gone.
        GraderError: the listing did not run.
    """
    result = sandbox.run_check(["/bin/sh", "-c", _LIST], timeout_s=_TIMEOUT_S)
    if result.exit_code != 0:
        raise GraderError(f"listing {WORKDIR} ended with {result.exit_code}: {result.stderr[-200:]!r}")
    complete = len(result.stdout) < MAX_LISTING and result.stdout_omitted == 0
    return Tree(entries=dict(_entries(result.stdout)), complete=complete, sandbox=sandbox)


def _entries(listing: bytes) -> Iterable[tuple[str, Entry]]:
    for row in listing.split(b"\0")[:-1]:
        kind, mode, size, path = row.split(b" ", 3)
        name = path.decode("utf-8", "surrogateescape")
        yield name, Entry(kind=kind.decode(), mode=int(mode, 8), size=int(size))
