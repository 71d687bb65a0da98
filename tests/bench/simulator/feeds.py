"""The ledger of one virtual node: every author's feed, with the store's rules and without disk or signatures.

The rules are those of `p2p/ledger/store.py`: entries of one author arrive in order, two that differ in one place
close the author's feed, and the proof of that travels with every exchange.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from atoll.node.daemon.consensus.types import EntrySeen
from atoll.protocols import codec
from atoll.protocols.ids import Digest, PeerId, digest
from atoll.protocols.ledger.records import Body, Epoch, Vote, epoch_id


class FeedEntry(NamedTuple):
    """One entry, as if it were signed and linked to the one before."""

    name: Digest
    author: PeerId
    seq: int
    previous: bytes
    """Id of the entry before; empty for the first."""
    body: Body
    seen: EntrySeen
    """The event of each node that stores it."""


def entry_after(author: PeerId, last: FeedEntry | None, body: Body) -> FeedEntry:
    """The author's entry after its last one; None: the first."""
    seq, previous = (last.seq + 1, bytes(last.name)) if last else (0, b"")
    name = digest(author.encode(), seq.to_bytes(4, "big"), previous, codec.encode(body))
    return FeedEntry(name, author, seq, previous, body, EntrySeen(name, author, body))


class Feeds:
    """What one node has of all feeds. Survives every crash."""

    def __init__(self) -> None:
        self.by_author: dict[PeerId, list[FeedEntry]] = {}
        self.arrivals: list[FeedEntry] = []
        """All entries in the order in which they came."""
        self.forked: set[PeerId] = set()
        """Authors that signed two histories: nothing more of them is accepted."""

        self._by_name: dict[Digest, FeedEntry] = {}
        self._cited: list[FeedEntry] = []
        """The votes and epochs of `arrivals`: `find` looks through these."""
        self.orphans: dict[Digest, FeedEntry] = {}
        """Entries of these authors that their feeds here do not hold, by id."""

    def next(self, author: PeerId) -> int:
        """Place of the author's next entry."""
        return len(self.by_author.get(author, ()))

    def last(self, author: PeerId) -> FeedEntry | None:
        """The author's newest entry; None: there is none."""
        return next(reversed(self.by_author.get(author, ())), None)

    def insert(self, entry: FeedEntry) -> bool:
        """Store an entry if it is new and the next of its author; whether it was."""
        name, author, seq, previous, body, _ = entry
        feed = self.by_author.setdefault(author, [])
        if author in self.forked or seq > len(feed):
            return False
        if seq < len(feed):
            if feed[seq].name != name:
                self.forked.add(author)
            return False
        if feed and feed[-1].name != previous:
            self.forked.add(author)
            return False
        feed.append(entry)
        self.arrivals.append(entry)
        self._by_name[name] = entry
        if type(body) is Vote or type(body) is Epoch:
            self._cited.append(entry)
        return True

    def find(self, names: Collection[Digest], proposals: Collection[Digest]) -> list[FeedEntry]:
        """Entries with these ids, signatures under epochs with these ids, and all votes for these proposals."""
        here, wanted, chosen = self._by_name | self.orphans, {*names}, {*proposals}
        cited = [*self._cited, *self.orphans.values()]
        votes = [e for e in cited if isinstance(e.body, Vote) and e.body.proposal in chosen]
        signed = [e for e in cited if isinstance(e.body, Epoch) and epoch_id(e.body) in wanted]
        return [here[name] for name in names if name in here] + signed + votes

    def keep_orphans(self, entries: Iterable[FeedEntry]) -> list[FeedEntry]:
        """Keep those that are of forked authors and not here; return them."""
        here = {entry.name for author in self.forked for entry in self.by_author.get(author, ())}
        fresh = [e for e in entries if e.author in self.forked and e.name not in here | self.orphans.keys()]
        self.orphans |= {entry.name: entry for entry in fresh}
        return fresh

    def lacks(self, other: "Feeds") -> list[FeedEntry]:
        """The entries that `other` has and this one would accept, each feed in order."""
        found: list[FeedEntry] = []
        own = self.by_author
        for author, feed in other.by_author.items():
            mine = own.get(author, ())
            if len(mine) < len(feed) and author not in self.forked:
                # A link names the entry before: who holds another one there sees the fork.
                if mine and feed[len(mine) - 1].name != mine[-1].name:
                    self.forked.add(author)
                else:
                    found += feed[len(mine) :]
        self.forked |= other.forked
        return found
