"""Authors that final sets, epochs or the RunSpec name, and those of them that gave their places back.

Each exchange names all authors with a place, so places are few. Noise of legal size gets into a final set, too,
and honest members come and go. So where all places are taken, those authors *rest* that the fewest final sets
name, of equals whoever was named longest ago; nobody whom the newest final set names. The feed of an author that
rests stays on the disk, for final sets name its entries, but no exchange brings it to others unless they ask for
it. An author that rests and writes again is as a newcomer; its next final set gives it its place again.
"""

import heapq
from collections.abc import Collection

from atoll.p2p.ledger.shares import Shares
from atoll.protocols.ids import PeerId

ALIKE = 8
"""Authors that so many final sets name, or more, rest in the order in which they were named."""


class Accepted:
    """Who has a place for good, as far as there are places."""

    def __init__(self, shares: Shares, most: int) -> None:
        """`shares` counts the final sets of each author, and knows whose ledger this is."""
        self.most = most
        self.resting: set[PeerId] = set()
        """Authors whose feeds are here, and rest."""
        self.woken: set[PeerId] = set()
        """Authors that rested, and have a newcomer's place again."""
        self._shares = shares
        self._fixed: frozenset[PeerId] = frozenset()
        """This node, and whom the RunSpec names; empty until that is known."""
        self._rounds = 0
        self._named = dict.fromkeys({shares.own} - {PeerId("")}, 0)
        """When each was named last, in final sets."""

    def __contains__(self, author: PeerId) -> bool:
        return author in self._named

    def __len__(self) -> int:
        return len(self._named)

    def add(self, authors: Collection[PeerId], *, by_work: bool) -> None:
        """A final set (`by_work`), an epoch, or first of all the RunSpec names these."""
        self._rounds += by_work
        self._fixed = self._fixed or frozenset((self._shares.own, *authors))
        self.resting.difference_update(authors)
        self.woken.difference_update(authors)
        self._named.update(dict.fromkeys(authors, self._rounds))
        may_rest = (a for a, at in self._named.items() if at < self._rounds and a not in self._fixed)
        for author in heapq.nsmallest(len(self._named) - self.most, may_rest, key=self._standing):
            del self._named[author]
            if self._shares.holds(author):  # not so after a summary: then nobody rests, and it comes as anybody
                self.resting.add(author)

    def wake(self, author: PeerId) -> None:
        """It has a newcomer's place now."""
        if author in self.resting:
            self.resting.remove(author)
            self.woken.add(author)

    def lose(self, author: PeerId) -> bool:
        """It loses its newcomer's place. Whether it rests again, so that its feed stays."""
        is_old = author in self.woken
        if is_old:
            self.woken.remove(author)
            self.resting.add(author)
        return is_old

    def _standing(self, author: PeerId) -> tuple[int, int, PeerId]:
        return min(ALIKE, self._shares.rounds(author)), self._named[author], author
