"""Entries that a set or a ballot names and that are not here, by who names them.

A quorum decides what it names, so honest nodes have it. A single proposer may lie: each one has a part of its own,
so names that it made up push out its own only.
"""

from collections import OrderedDict
from collections.abc import Iterable

from atoll.p2p.ledger.shares import Need
from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import MAX_SET

_DECIDED = 4096
PROPOSERS = 64
"""Proposers whose names are remembered, each up to MAX_SET: only voters propose, and few in a round."""


class Required:
    """The names of one round."""

    def __init__(self) -> None:
        self._decided: OrderedDict[Digest, None] = OrderedDict()
        self._named: OrderedDict[PeerId, OrderedDict[Digest, None]] = OrderedDict()

    @property
    def need(self) -> Need:
        """The strongest need of what is not here."""
        return Need.DECIDED if self._decided else Need.NAMED if any(self._named.values()) else Need.NONE

    def add(self, entries: Iterable[Digest], proposer: PeerId | None) -> None:
        """A proposer names these entries; None: a quorum voted for what does."""
        table, most = self._decided, _DECIDED
        if proposer is not None:
            table, most = self._named.get(proposer, OrderedDict()), MAX_SET
            put_newest(self._named, proposer, table, PROPOSERS)
        for entry in entries:
            put_newest(table, entry, None, most)

    def take(self, entry: Digest) -> Need:
        """The entry is here: forget its name. Returns how strongly it was needed."""
        is_decided = entry in self._decided
        self._decided.pop(entry, None)
        naming = [named for named in self._named.values() if entry in named]
        for named in naming:
            del named[entry]
        return Need.DECIDED if is_decided else Need.NAMED if naming else Need.NONE

    def clear(self) -> None:
        """The round is final: what only a liar names never comes, and would hold all shares open."""
        self._decided.clear()
        self._named.clear()
