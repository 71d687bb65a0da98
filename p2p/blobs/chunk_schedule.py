"""Which holder is asked for which chunk: rarest first, each chunk once, the last ones twice. Pure."""

import statistics
from collections.abc import Iterable

from atoll.p2p.blobs.flow_window import FlowWindow
from atoll.p2p.blobs.frames import WINDOW
from atoll.protocols.ids import PeerId

SLOW_SHARE = 0.1
"""A holder below this share of the median of the others is dropped …"""
SLOW_AFTER_S = 5.0
"""… after it had so long to get going."""
PATIENCE_S = 1.0
"""A chunk is asked for a second time after so long when nobody's speed is known."""


class Holder:
    """One holder that we are talking to."""

    def __init__(self, have: int, pace: FlowWindow) -> None:
        self.have = have
        self.pace = pace
        self.asked: dict[int, float] = {}
        """Chunks on their way from it, in the order asked, and since when."""


class ChunkSchedule:
    """Chunks of one download. All times are seconds of one monotonic clock."""

    def __init__(self, missing: int, start: int = 0) -> None:
        """`missing`: one bit per chunk that is not here; `start`: where to begin among equally rare chunks."""
        self.missing = missing
        self._todo = missing
        self._start = start
        self._sources: dict[PeerId, Holder] = {}
        self._askers: dict[int, set[PeerId]] = {}
        """Chunks that were asked for and are not here: from whom."""

    @property
    def todo(self) -> int:
        """Chunks that nobody was asked for."""
        return self._todo

    def join(self, peer: PeerId, have: int, pace: FlowWindow) -> None:
        """A holder offers `have`."""
        self._sources[peer] = Holder(have, pace)

    def leave(self, peer: PeerId) -> None:
        """Nothing more comes from a holder; what it was asked for is free again."""
        source = self._sources.pop(peer, None)
        for index in source.asked if source else ():
            self._release(peer, index)
        for index in [index for index, askers in self._askers.items() if peer in askers]:
            self._release(peer, index)

    def add_chunks(self, peer: PeerId, have: int) -> None:
        """A holder has more."""
        self._sources[peer].have |= have

    def in_flight(self, peer: PeerId) -> int:
        """Chunks that a holder owes us."""
        return len(self._sources[peer].asked)

    def ask(self, peer: PeerId, index: int, now_s: float) -> None:
        """A holder was asked for a chunk."""
        source = self._sources[peer]
        source.asked[index] = now_s
        source.pace.asked(now_s)
        self._askers.setdefault(index, set()).add(peer)
        self._todo &= ~(1 << index)

    def received(self, peer: PeerId, index: int) -> None:
        """The bytes of a chunk are here, not yet verified: its sender owes it no more."""
        source = self._sources[peer]
        source.asked.pop(index, None)
        if not source.asked:
            source.pace.idle()

    def verified(self, index: int) -> None:
        """The chunk is on the disk."""
        self.missing &= ~(1 << index)
        self._todo &= ~(1 << index)
        self._askers.pop(index, None)

    def stale(self, peer: PeerId) -> list[int]:
        """What a holder was asked for and came from another one; it is forgotten here."""
        source = self._sources[peer]
        stale = [index for index in source.asked if not self.missing >> index & 1]
        for index in stale:
            self.received(peer, index)
        return stale

    def next(self, peer: PeerId, now_s: float) -> int | None:
        """The chunk to ask a holder for now, if any: a rare one, or one that another holder is late with."""
        source = self._sources[peer]
        if len(source.asked) >= source.pace.window(now_s, WINDOW):
            return None
        few = rarest(self._todo & source.have, self._others(peer))
        return first_from(few, self._start) if few else self._late(peer, source, now_s)

    def can_help(self, peer: PeerId) -> bool:
        """Whether a holder has anything that is missing."""
        return bool(self._sources[peer].have & self.missing)

    def is_slow(self, peer: PeerId, now_s: float) -> bool:
        """Whether a holder has fallen far behind the others."""
        pace = self._sources[peer].pace
        silent_s = now_s - pace.moved_s if self._sources[peer].asked else 0.0
        others = [self._sources[other].pace.rate_bytes_s(now_s) for other in self._sources if other != peer]
        known = [rate for rate in others if rate is not None]
        if pace.busy_s + silent_s < SLOW_AFTER_S or not known:
            return False
        return (pace.rate_bytes_s(now_s) or 0.0) < SLOW_SHARE * statistics.median(known)

    def left_s(self, now_s: float) -> float:
        """Seconds until the last chunk that is on its way is due; what is unknown takes as long as it took."""
        due = [self._due_s(peer, index, now_s) for peer, s in self._sources.items() for index in s.asked]
        return max(due, default=0.0)

    def _late(self, peer: PeerId, source: Holder, now_s: float) -> int | None:
        """The end game: with nothing else to do, the chunk that would come much sooner from here."""
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
        """Seconds until a chunk comes from a holder that was asked for it; a silence is expected to go on."""
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
    """Those of the candidates that the fewest of the others have."""
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
    """The lowest bit at or above `start`, else the lowest."""
    above = bits >> start << start
    chosen = above or bits
    return (chosen & -chosen).bit_length() - 1
