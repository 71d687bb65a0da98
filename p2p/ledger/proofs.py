"""Proofs that an author signed two histories of its feed: two of its entries that cannot both belong to one.

A proof ends a feed for good, at each node that has it. Nodes with other entries hold other proofs of the same
author; all of them say the same, so nothing that nodes agree on may depend on which one it is.
"""

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

from atoll.p2p.ledger.database import Database
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES, Entry, encode_entry

NAMED = 1024
"""Most equivocators that one message names. Of more it names so many that follow each other by name."""
OFFERED = 2
"""Most proofs of one message."""
_OFFERED_BYTES = 2 * ENTRY_MAX_BYTES
"""Most bytes of the proofs of one message: the largest proof."""

Proof: TypeAlias = tuple[bytes, bytes]
"""Two signed entries of one author, as on the wire."""


class LackedProofs(NamedTuple):
    """Equivocators whose proofs are here and not at a peer, as far as its message says so."""

    in_use: set[PeerId]
    """The peer goes on with their feeds, so it takes these proofs."""
    others: set[PeerId]
    """It may refuse these, and each time: of who has neither a feed there nor work."""

    def __bool__(self) -> bool:
        return bool(self.in_use or self.others)


class ProofTable:
    """The proofs of one ledger, one of each author. All writes belong into a transaction of the caller."""

    def __init__(self, database: Database) -> None:
        """Raises DiskFault, CorruptFault."""
        self._db = database
        self._names: list[PeerId] | None = None
        """All in order; None: not known since the last change."""

    def authors(self) -> set[PeerId]:
        """Authors that are proven to have signed two histories."""
        return {PeerId(author) for (author,) in self._db.rows("SELECT author FROM proofs")}

    def get(self, author: PeerId) -> Proof | None:
        """The proof against an author; None without one."""
        rows = self._db.rows("SELECT first, second FROM proofs WHERE author = ?", author)
        return (rows[0][0], rows[0][1]) if rows else None

    def write(self, first: Entry, second: Entry) -> None:
        """Store a proof; an earlier one of this author stays."""
        self._names = None
        data = encode_entry(first), encode_entry(second)
        self._db.write("INSERT OR IGNORE INTO proofs VALUES (?, ?, ?)", first.author, *data)

    def forget(self, author: PeerId) -> None:
        """The author goes, and its proof."""
        self._names = None
        self._db.write("DELETE FROM proofs WHERE author = ?", author)

    def named(self, forked: set[PeerId], rng: random.Random) -> tuple[PeerId, ...]:
        """Those of `forked` that a message names: all, or NAMED from one by chance on. After the last comes the
        first.
        """
        names = self._in_order(forked)
        # Also where just so many fit: a peer takes a full list for a part, and looks between its ends only.
        start = rng.randrange(len(names)) if len(names) >= NAMED else 0
        return tuple((names[start:] + names[:start])[:NAMED])

    def lacking(self, forked: set[PeerId], named: Sequence[PeerId], in_use: set[PeerId]) -> LackedProofs:
        """Those of `forked` that a peer lacks which names these. `in_use`: authors with whose feeds it goes on."""
        used = (forked & in_use).difference(named)
        # Of a part of the names only what lies between its ends is known to be missing.
        others = forked if len(named) < NAMED else self._between(forked, named[0], named[-1])
        return LackedProofs(used, set(others).difference(named, used))

    def _between(self, forked: set[PeerId], first: PeerId, last: PeerId) -> list[PeerId]:
        names = self._in_order(forked)
        start, end = bisect_left(names, first), bisect_right(names, last)
        return names[start:end] if first <= last else names[start:] + names[:end]

    def _in_order(self, forked: set[PeerId]) -> list[PeerId]:
        self._names = sorted(forked) if self._names is None else self._names
        return self._names

    def offered(
        self,
        lacking: LackedProofs,
        resting: Collection[PeerId],
        weight: Callable[[PeerId], Any],
        rng: random.Random,
    ) -> list[Proof]:
        """At most OFFERED proofs for a peer that lacks these.

        First those that it takes, the lowest `weight` first: few made-up identities would keep back all that
        matters. Of the others the first, without those that rest, and one by chance: a peer may refuse the first.
        """
        chosen = heapq.nsmallest(OFFERED, lacking.in_use, key=weight)
        if len(lacking.others) <= OFFERED:
            chosen += sorted(lacking.others, key=weight)
        else:
            chosen += heapq.nsmallest(1, lacking.others.difference(resting), key=weight)
            chosen.append(rng.choice(sorted(lacking.others.difference(chosen))))
        return self._fitting(chosen[:OFFERED])

    def _fitting(self, authors: Collection[PeerId]) -> list[Proof]:
        found: list[Proof] = []
        size = 0
        for proof in filter(None, map(self.get, authors)):
            size += sum(map(len, proof))
            if found and size > _OFFERED_BYTES:
                break
            found.append(proof)
        return found


def contradicts(first: Entry, second: Entry) -> bool:
    """Whether two verified entries prove that their author signed two histories."""
    if first.author != second.author:
        return False
    if first.seq == second.seq:
        return first.id != second.id
    low, high = sorted((first, second), key=lambda entry: entry.seq)
    return high.seq == low.seq + 1 and high.previous != low.id
