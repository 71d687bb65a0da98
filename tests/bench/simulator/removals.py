"""What one virtual node does about members that the run's owner or its voters excluded.

As `Removals` of the daemon, without the traffic: what an excluded member writes still comes, and must not count.
"""

from typing import TYPE_CHECKING

from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Exclude
from atoll_bench.simulator.feeds import FeedEntry

if TYPE_CHECKING:
    from atoll_bench.simulator.member import Member


class Removals:
    """The exclusions that a node knows, and since when. The records are on its disk; `begin` forgets the rest."""

    def __init__(self, member: "Member") -> None:
        self._member = member
        self.votes = set[tuple[PeerId, PeerId]]()
        """Author and member of each Exclude in the ledger."""
        self.by_owner: dict[PeerId, list[tuple[int, float]]] = {}
        """By member: the first round without it, and the virtual second at which the record came."""

    def begin(self) -> None:
        """A new life of the node."""
        self._found: dict[PeerId, int] = {}
        self._is_paused = False

    def on_entry(self, entry: FeedEntry) -> None:
        """An entry is in the ledger now."""
        if isinstance(body := entry.body, Exclude):
            self.votes.add((entry.author, body.peer))
            if entry.author == self._member.world.owner:
                self.by_owner.setdefault(body.peer, []).append((body.round, self._member.clock.now))

    def step(self) -> None:
        """Tell the round machine who is newly excluded, and pause this node once its round has come."""
        member, book = self._member, self._member.finality.epochs
        if not book.excluded and not book.voted_out:
            return  # nearly always
        for peer, first in (*book.excluded.items(), *book.voted_out.items()):
            if first < self._found.get(peer, first + 1):
                self._found[peer] = first
                if peer != member.peer:
                    member.post_round(AuthorExcluded(peer, Round(first), member.now()))
        at_work = max(member.finality.deciding, member.round.round)
        is_due = self.is_excluded(member.peer, at_work)
        if is_due and not (self._is_paused or member.is_liar):
            self._is_paused = True
            member.post_round(Pause("excluded", member.now()))

    def is_excluded(self, peer: PeerId, number: int) -> bool:
        """Whether a peer is excluded from this round, or from one before it."""
        return number >= self._found.get(peer, number + 1)

    def excluded_from(self, number: int) -> set[PeerId]:
        """The peers that are excluded from this round, or from one before it."""
        return {peer for peer, first in self._found.items() if number >= first}

    @property
    def has_any(self) -> bool:
        """Whether anybody is excluded."""
        return bool(self._found)
