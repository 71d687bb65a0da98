"""Chunk schedule: which chunk to request from which holder; rarest first, each once, the last ones twice. Pure.

A flow window measures how fast one holder sends, and derives its window and due times.
"""

import statistics
from collections.abc import Iterable

from atoll.p2p.blobs.frames import WINDOW
from atoll.protocols.blobs import BLOB_CHUNK_BYTES
from atoll.protocols.ids import PeerId

FIRST_WINDOW = 2
_MEMORY_S = 4.0
"""Seconds of transfer after which older measurements count half."""
_JITTER_S = 0.01
"""Scheduling delay of a busy machine, in seconds."""
SLOW_SHARE = 0.1
"""A holder slower than this share of the median of the others is dropped."""
SLOW_AFTER_S = 5.0
"""Seconds of transfer after which a holder may count as slow."""
PATIENCE_S = 1.0
"""Seconds after which a chunk is requested a second time while no holder's speed is known."""


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


class Holder:
    """State of one holder of a download."""

    def __init__(self, have: int, pace: FlowWindow) -> None:
        self.have = have
        self.pace = pace
        self.asked: dict[int, float] = {}
        """Chunks requested from it and not received, in the order of the requests, with their times."""


class ChunkSchedule:
    """The chunks of one download. All times are seconds of one monotonic clock."""

    def __init__(self, missing: int, start: int = 0) -> None:
        """`missing`: one bit per missing chunk; `start`: first choice among equally rare chunks."""
        self.missing = missing
        self._todo = missing
        self._start = start
        self._sources: dict[PeerId, Holder] = {}
        self._askers: dict[int, set[PeerId]] = {}
        """Holders from which each missing chunk was requested."""

    @property
    def todo(self) -> int:
        """Chunks that were not requested from any holder, one bit each."""
        return self._todo

    def join(self, peer: PeerId, have: int, pace: FlowWindow) -> None:
        """Add a holder that offers the chunks in `have`, one bit each."""
        self._sources[peer] = Holder(have, pace)

    def leave(self, peer: PeerId) -> None:
        """Remove a holder; chunks requested from it can be requested from others again."""
        source = self._sources.pop(peer, None)
        for index in source.asked if source else ():
            self._release(peer, index)
        for index in [index for index, askers in self._askers.items() if peer in askers]:
            self._release(peer, index)

    def add_chunks(self, peer: PeerId, have: int) -> None:
        """Add chunks that a holder offers now."""
        self._sources[peer].have |= have

    def in_flight(self, peer: PeerId) -> int:
        """Number of chunks requested from a holder and not received."""
        return len(self._sources[peer].asked)

    def ask(self, peer: PeerId, index: int, now_s: float) -> None:
        """Record that a chunk was requested from a holder."""
        source = self._sources[peer]
        source.asked[index] = now_s
        source.pace.asked(now_s)
        self._askers.setdefault(index, set()).add(peer)
        self._todo &= ~(1 << index)

    def received(self, peer: PeerId, index: int) -> None:
        """Record that a chunk's bytes arrived from a holder; they are not verified yet."""
        source = self._sources[peer]
        source.asked.pop(index, None)
        if not source.asked:
            source.pace.idle()

    def verified(self, index: int) -> None:
        """Record that a chunk was verified and written."""
        self.missing &= ~(1 << index)
        self._todo &= ~(1 << index)
        self._askers.pop(index, None)

    def stale(self, peer: PeerId) -> list[int]:
        """Remove and return chunks requested from a holder that arrived from another one meanwhile."""
        source = self._sources[peer]
        stale = [index for index in source.asked if not self.missing >> index & 1]
        for index in stale:
            self.received(peer, index)
        return stale

    def next(self, peer: PeerId, now_s: float) -> int | None:
        """Chunk to request from a holder now: a rare one, or one that another holder is late with; else None."""
        source = self._sources[peer]
        if len(source.asked) >= source.pace.window(now_s, WINDOW):
            return None
        few = rarest(self._todo & source.have, self._others(peer))
        return first_from(few, self._start) if few else self._late(peer, source, now_s)

    def can_help(self, peer: PeerId) -> bool:
        """Whether a holder offers any missing chunk."""
        return bool(self._sources[peer].have & self.missing)

    def is_slow(self, peer: PeerId, now_s: float) -> bool:
        """Whether a holder is far slower than the others."""
        pace = self._sources[peer].pace
        silent_s = now_s - pace.moved_s if self._sources[peer].asked else 0.0
        others = [self._sources[other].pace.rate_bytes_s(now_s) for other in self._sources if other != peer]
        known = [rate for rate in others if rate is not None]
        if pace.busy_s + silent_s < SLOW_AFTER_S or not known:
            return False
        return (pace.rate_bytes_s(now_s) or 0.0) < SLOW_SHARE * statistics.median(known)

    def left_s(self, now_s: float) -> float:
        """Expected seconds until the last requested chunk arrives; with no known rate, the time waited so far."""
        due = [self._due_s(peer, index, now_s) for peer, s in self._sources.items() for index in s.asked]
        return max(due, default=0.0)

    def _late(self, peer: PeerId, source: Holder, now_s: float) -> int | None:
        """End game: for an idle holder, a chunk that would arrive much sooner from it than from its holder."""
        if source.asked:
            return None
        ours_s = source.pace.needs_s(1, now_s)
        limit_s = 2 * ours_s + 0.05 if ours_s is not None else PATIENCE_S
        late = [
            (self._due_s(other, index, now_s), -index)
            for other, theirs in self._sources.items()
            for index in theirs.asked
            if other != peer and source.have >> index & 1 and self._askers.get(index) == {other}
        ]
        due_s, index = max(late, default=(0.0, 0))
        return -index if due_s > limit_s else None

    def _due_s(self, peer: PeerId, index: int, now_s: float) -> float:
        """Expected seconds until a requested chunk arrives; a silent holder is expected to stay silent."""
        source = self._sources[peer]
        waited_s = now_s - source.asked[index]
        needs_s = source.pace.needs_s(list(source.asked).index(index) + 1, now_s)
        return waited_s if needs_s is None else max(needs_s, 2 * (now_s - source.pace.moved_s))

    def _others(self, peer: PeerId) -> list[int]:
        return [source.have for other, source in self._sources.items() if other != peer]

    def _release(self, peer: PeerId, index: int) -> None:
        askers = self._askers.get(index)
        if askers is None:
            return
        askers.discard(peer)
        if not askers:
            del self._askers[index]
            self._todo |= self.missing & (1 << index)


def rarest(candidates: int, others: Iterable[int]) -> int:
    """The candidates that the fewest of the other holders have, one bit each."""
    at_least: list[int] = []
    for have in others:
        carry = have & candidates
        for level, bits in enumerate(at_least):
            at_least[level], carry = bits | carry, bits & carry
        at_least.append(carry)
    for bits in at_least:
        if few := candidates & ~bits:
            return few
    return candidates


def first_from(bits: int, start: int) -> int:
    """Index of the lowest set bit at or above `start`, else of the lowest set bit."""
    above = bits >> start << start
    chosen = above or bits
    return (chosen & -chosen).bit_length() - 1
