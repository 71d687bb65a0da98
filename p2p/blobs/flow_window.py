"""Flow window: measures how fast one holder sends, and derives its window and due times. Pure."""

from atoll.protocols.blobs import BLOB_CHUNK_BYTES

FIRST_WINDOW = 2
_MEMORY_S = 4.0
"""Seconds of transfer after which older measurements count half."""
_JITTER_S = 0.01
"""Scheduling delay of a busy machine, in seconds."""


class FlowWindow:
    """Rate and round-trip time of one holder, measured only while a requested chunk is in flight."""

    def __init__(self, now_s: float) -> None:
        self.rtt_s = 0.1
        """Seconds from our first request to its answer; a guess until then."""
        self.moved_s = now_s
        """Time of the newest bytes, or of the first request after a pause."""
        self.busy_s = 0.0
        """Total seconds with a chunk in flight."""
        self._waiting = False
        self._bytes = 0.0
        self._seconds = 0.0

    def asked(self, now_s: float) -> None:
        """Record a request for one more chunk."""
        if not self._waiting:
            self._waiting, self.moved_s = True, now_s

    def moved(self, size_bytes: int, now_s: float) -> None:
        """Record `size_bytes` received."""
        elapsed_s = now_s - self.moved_s if self._waiting else 0.0
        self._bytes += size_bytes
        self._seconds += elapsed_s
        self.busy_s += elapsed_s
        self.moved_s = now_s
        if self._seconds > _MEMORY_S:
            self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    def idle(self) -> None:
        """Record that no chunk is in flight."""
        self._waiting = False

    def rate_bytes_s(self, now_s: float) -> float | None:
        """Recent rate in bytes per second; silence counts while a chunk is in flight. None: not known yet."""
        seconds = self._seconds + (now_s - self.moved_s if self._waiting else 0.0)
        return self._bytes / seconds if self._bytes and seconds > 0 else None

    def window(self, now_s: float, most: int) -> int:
        """Number of chunks to keep in flight: twice the bandwidth-delay product, between two and `most`."""
        rate = self.rate_bytes_s(now_s)
        if rate is None:
            return FIRST_WINDOW
        fits = 2 * rate * (self.rtt_s + _JITTER_S) / BLOB_CHUNK_BYTES
        return max(FIRST_WINDOW, min(most, 2 + int(fits)))

    def needs_s(self, chunks: int, now_s: float) -> float | None:
        """Expected seconds until `chunks` requested now have arrived. None: not known yet."""
        rate = self.rate_bytes_s(now_s)
        return None if rate is None else self.rtt_s + chunks * BLOB_CHUNK_BYTES / rate
