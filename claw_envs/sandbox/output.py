"""A stream kept by its head and tail, so that a flood costs bounded memory.

In: chunks of bytes. Out: the first and the last half of the allowance, and counts. Knows nothing of commands.
"""


class HeadTail:
    """Keeps at most `limit` bytes of what is fed: the first half and the last half."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit // 2
        self._tail_limit = limit - limit // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        """Bytes fed so far."""

    def feed(self, chunk: bytes) -> None:
        """Takes the next bytes of the stream."""
        self.total += len(chunk)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk[-self._tail_limit :] if self._tail_limit else b""
        if len(self._tail) > self._tail_limit:
            del self._tail[: len(self._tail) - self._tail_limit]

    @property
    def omitted(self) -> int:
        """Bytes left out between the halves."""
        return self.total - len(self._head) - len(self._tail)

    def value(self) -> bytes:
        """Head and tail; they touch where nothing was left out."""
        return bytes(self._head + self._tail)
