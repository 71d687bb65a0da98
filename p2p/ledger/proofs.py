"""Proofs that an author signed two histories of its feed: two of its entries that cannot both belong to one.

A proof ends a feed for good, at each node that has it. Nodes with other entries hold other proofs of the same
author; all of them say the same, so nothing that nodes agree on may depend on which one it is.
"""

from collections.abc import Callable, Collection
from typing import TypeAlias

from atoll.p2p.ledger.database import Database
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import Entry, encode_entry

Proof: TypeAlias = tuple[bytes, bytes]
"""Two signed entries of one author, as on the wire."""


class ProofTable:
    """The proofs of one ledger, one of each author. All writes belong into a transaction of the caller."""

    def __init__(self, database: Database) -> None:
        """Raises DiskFault, CorruptFault."""
        self._db = database

    def authors(self) -> set[PeerId]:
        """Authors that are proven to have signed two histories."""
        return {PeerId(author) for (author,) in self._db.rows("SELECT author FROM proofs")}

    def get(self, author: PeerId) -> Proof | None:
        """The proof against an author; None without one."""
        rows = self._db.rows("SELECT first, second FROM proofs WHERE author = ?", author)
        return (rows[0][0], rows[0][1]) if rows else None

    def write(self, first: Entry, second: Entry) -> None:
        """Store a proof; an earlier one of this author stays."""
        data = encode_entry(first), encode_entry(second)
        self._db.write("INSERT OR IGNORE INTO proofs VALUES (?, ?, ?)", first.author, *data)

    def forget(self, author: PeerId) -> None:
        """The author goes, and its proof."""
        self._db.write("DELETE FROM proofs WHERE author = ?", author)

    def offered(
        self, lacking: Collection[PeerId], most: int, is_accepted: Callable[[PeerId], bool]
    ) -> list[Proof]:
        """At most `most` proofs for a peer that lacks these.

        Those against accepted authors come first: a peer may refuse others each time, and two made-up identities
        would keep back all that matters.
        """
        chosen = sorted(lacking, key=lambda author: (not is_accepted(author), author))[:most]
        return [proof for author in chosen if (proof := self.get(author)) is not None]


def contradicts(first: Entry, second: Entry) -> bool:
    """Whether two verified entries prove that their author signed two histories."""
    if first.author != second.author:
        return False
    if first.seq == second.seq:
        return first.id != second.id
    low, high = sorted((first, second), key=lambda entry: entry.seq)
    return high.seq == low.seq + 1 and high.previous != low.id
