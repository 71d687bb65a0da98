"""The ledger of one virtual node: every author's feed, with the store's rules and without disk or signatures.

The rules are those of `p2p/ledger/store.py`: entries of one author arrive in order, two that differ in one place
close the author's feed, and the proof of that travels with every exchange.
"""

from typing import NamedTuple

from atoll.protocols import codec
from atoll.protocols.ids import Digest, PeerId, digest
from atoll.protocols.ledger.records import Body


class FeedEntry(NamedTuple):
    """One entry, as if it were signed and linked to the one before."""

    name: Digest
    author: PeerId
    seq: int
    body: Body


def entry_of(author: PeerId, seq: int, body: Body) -> FeedEntry:
    """The entry of this author in this place."""
    return FeedEntry(digest(author.encode(), seq.to_bytes(4, "big"), codec.encode(body)), author, seq, body)


class Feeds:
    """What one node has of all feeds. Survives every crash."""

    def __init__(self) -> None:
        self.by_author: dict[PeerId, list[FeedEntry]] = {}
        self.arrivals: list[FeedEntry] = []
        """All entries in the order in which they came."""
        self.forked: set[PeerId] = set()
        """Authors that signed two histories: nothing more of them is accepted."""

    def next(self, author: PeerId) -> int:
        """Place of the author's next entry."""
        return len(self.by_author.get(author, ()))

    def insert(self, entry: FeedEntry) -> bool:
        """Store an entry if it is new and the next of its author; whether it was."""
        feed = self.by_author.setdefault(entry.author, [])
        if entry.author in self.forked or entry.seq > len(feed):
            return False
        if entry.seq < len(feed):
            if feed[entry.seq].name != entry.name:
                self.forked.add(entry.author)
            return False
        feed.append(entry)
        self.arrivals.append(entry)
        return True

    def lacks(self, other: "Feeds") -> list[FeedEntry]:
        """The entries that `other` has and this one would accept, each feed in order."""
        found: list[FeedEntry] = []
        for author, feed in other.by_author.items():
            mine = self.by_author.get(author, [])
            if author not in self.forked and len(mine) < len(feed):
                # A link names the entry before: who holds another one there sees the fork.
                if mine and feed[len(mine) - 1].name != mine[-1].name:
                    self.forked.add(author)
                else:
                    found += feed[len(mine) :]
        self.forked |= other.forked
        return found
