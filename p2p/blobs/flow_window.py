"""How fast one holder sends, and what follows from that: its window, when a chunk is due. Pure; time is given."""

from atoll.protocols.blobs import BLOB_CHUNK_BYTES

FIRST_WINDOW = 2
_MEMORY_S = 4.0
_JITTER_S = 0.01
"""A busy machine looks away for so long."""


class FlowWindow:
    """Measured while something is on its way: what nobody asked for does not count as slow."""

    def __init__(self, now_s: float) -> None:
        self.rtt_s = 0.1
        """From our question to the first answer; a guess until then."""
        self.moved_s = now_s
        """When bytes came last, or when something was asked for after a pause."""
        self.busy_s = 0.0
        """Seconds in all during which something was on its way."""
        self._waiting = False
        self._bytes = 0.0
        self._seconds = 0.0

    def asked(self, now_s: float) -> None:
        """One more chunk is on its way."""
        if not self._waiting:
            self._waiting, self.moved_s = True, now_s

    def moved(self, size_bytes: int, now_s: float) -> None:
        """Bytes came."""
        elapsed_s = now_s - self.moved_s if self._waiting else 0.0
        self._bytes += size_bytes
        self._seconds += elapsed_s
        self.busy_s += elapsed_s
        self.moved_s = now_s
        if self._seconds > _MEMORY_S:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    def idle(self) -> None:
        """Nothing is on its way."""
        self._waiting = False

    def rate_bytes_s(self, now_s: float) -> float | None:
        """Bytes per second lately; a silence counts while something is on its way. None: not known yet."""
        seconds = self._seconds + (now_s - self.moved_s if self._waiting else 0.0)
        return self._bytes / seconds if self._bytes and seconds > 0 else None

    def window(self, now_s: float, most: int) -> int:
        """Chunks to have on the way: twice what fits into the path, and never fewer than two."""
        rate = self.rate_bytes_s(now_s)
        if rate is None:
            return FIRST_WINDOW
        fits = 2 * rate * (self.rtt_s + _JITTER_S) / BLOB_CHUNK_BYTES
        return max(FIRST_WINDOW, min(most, 2 + int(fits)))

    def needs_s(self, chunks: int, now_s: float) -> float | None:
        """Seconds for `chunks` that are asked for now. None: not known yet."""
        rate = self.rate_bytes_s(now_s)
        return None if rate is None else self.rtt_s + chunks * BLOB_CHUNK_BYTES / rate
