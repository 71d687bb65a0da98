"""Members that lie: they say whatever a member can sign, where it would serve them.

A liar trains and answers like others most of the time, because who is always silent does less harm.
"""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from atoll.node.daemon.consensus import types as finality_types
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.choices import Choice
from atoll.protocols.ledger.records import (
    Ballot,
    BallotBody,
    Body,
    Contribution,
    Epoch,
    Exclude,
    ExcludingProposal,
    Follow,
    Leave,
    Prepare,
    Promise,
    Proposal,
    Vote,
    epoch_id,
)
from atoll_bench.simulator.feeds import FeedEntry, entry_after
from atoll_bench.simulator.member import TICK_S, Member

if TYPE_CHECKING:
    from atoll_bench.simulator.world import World

LIE_EVERY_S = 20.0
MOST_ENTRIES = 1500


class Liar(Member):
    """Equivocates, votes for what it did not fold, opens ballots and epochs out of turn, or forks its feed."""

    is_liar = True

    def __init__(self, world: "World", number: int, peer: PeerId, train_s: float) -> None:
        super().__init__(world, number, peer, train_s)
        self._is_forker = world.rng.random() < 0.25
        self._is_mute = world.rng.random() < 0.25
        """It keeps back its ballots, but for its lies."""

    def boot(self) -> None:
        """Start, and lie from time to time."""
        super().boot()
        self.later(self.world.rng.uniform(0.0, 2 * LIE_EVERY_S), self._lie)

    def perform_finality(self, action: finality_types.Action) -> None:
        """Do what an honest node does, or not."""
        is_ballot = isinstance(action, finality_types.Append) and isinstance(action.body, BallotBody)
        if is_ballot and self._is_mute and self.world.rng.random() < 0.7:
            self.later(LIE_EVERY_S, lambda: self.post_finality(finality_types.AppendRefused()))
            return
        super().perform_finality(action)

    def _lie(self) -> None:
        rng, state = self.world.rng, self.finality
        self.later(rng.expovariate(1 / LIE_EVERY_S), self._lie)
        if not self.is_synced or self.feeds.next(self.peer) > MOST_ENTRIES:
            return
        if self._is_forker and rng.random() < 0.03:
            self._fork()
        elif self.peer in state.voters and state.deciding < state.rounds:
            self.write(rng.choice(self._ballots() + self._epochs() + self._removals()))

    def _ballots(self) -> list[Body]:
        state, rng = self.finality, self.world.rng
        number, book, peers = Round(state.deciding), state.book, state.voters
        attempt = peers.index(self.peer) + len(peers) * rng.randint(0, 1 + state.attempt // len(peers))
        ballot = Ballot(attempt, self.peer, state.epoch)
        names = sorted(book.contributions)
        some = tuple(sorted(rng.sample(names, rng.randint(max(1, len(names) - 2), len(names))))) if names else ()
        lies: list[Body] = [Prepare(number, ballot)]
        lies += [Promise(number, at, ()) for at in sorted(book.prepares)]
        lies += [Vote(number, p.ballot, entry) for entry, p in sorted(book.proposals.items())]
        if some:
            state_of = state.checked.get(Choice(some), digest(b"made up", *some))
            lies += 3 * [Proposal(number, ballot, some, state_of)]
            lies.append(ExcludingProposal(number, ballot, some, state_of, (self._victim(),)))
        return lies

    def _victim(self) -> PeerId:
        return self.world.rng.choice([m.peer for m in self.world.members[1:] if m is not self])

    def _removals(self) -> list[Body]:
        """Votes against whom it likes."""
        return [Exclude(Round(max(0, self.finality.deciding - at)), self._victim(), "") for at in (0, 2)]

    def _epochs(self) -> list[Body]:
        """Epochs of its own, of all, of strangers; ballots in them; chains that nobody knows."""
        state, rng = self.finality, self.world.rng
        at = Round(max(0, state.deciding - rng.randint(0, 2)))
        everybody = [member.peer for member in self.world.members]
        members = rng.choice(([self.peer], list(state.voters), [self.peer, *rng.sample(everybody, 2)]))
        epoch = Epoch(at, rng.choice((state.epoch, b"", digest(b"unknown"))), tuple(sorted(set(members))))
        name = epoch_id(epoch)
        votes: list[Body] = [
            Vote(state.deciding, replace(p.ballot, epoch=name), entry)
            for entry, p in sorted(state.book.proposals.items())
        ]
        unknown: Digest = digest(b"unknown")
        return [epoch, Follow(at, name), Follow(at, b""), Follow(at, unknown), Leave(at), *votes[:2]]

    def _fork(self) -> None:
        """Write two histories, one for each half of the others: a contribution, and ballots."""
        number, rng = Round(self.round.round), self.world.rng
        self.world.trace("fork", self.number, self.feeds.next(self.peer))
        halves = []
        for half in (0, 1):
            payload = digest(b"forked", self.peer.encode(), bytes([half]))
            work = Contribution(number, digest(b"base"), payload, 1, 1, 64, 1.0)
            ballots = self._ballots() if self.peer in self.finality.voters else []
            bodies = [work, *rng.sample(ballots, min(3, len(ballots)))]
            rng.shuffle(bodies)
            entries: list[FeedEntry] = []
            for body in bodies:
                entries.append(
                    entry_after(self.peer, entries[-1] if entries else self.feeds.last(self.peer), body)
                )
            halves.append(entries)
            self.world.name_payload(payload, entries[bodies.index(work)])
            self.world.holders.setdefault(payload, set()).add(self.number)
        for other in self.world.heard_by(self):
            for entry in halves[other.number % 2]:
                other.arrive(self.clock.now + 0.2, entry)


class TurnTaker(Member):
    """Answers every other ballot, half of its kind the even ones, so that it never misses two in a row.

    It opens no ballots. By the world's plan it keeps back its votes alone or its promises too, and its signatures.
    """

    is_liar = True

    def perform_finality(self, action: finality_types.Action) -> None:
        """Do what an honest node does, but for what it keeps back."""
        if isinstance(action, finality_types.Append) and self._keeps_back(action.body):
            self.later(TICK_S, lambda: self.post_finality(finality_types.AppendRefused()))
            return
        super().perform_finality(action)

    def _keeps_back(self, body: Body) -> bool:
        plan = self.world.setting.plan
        if isinstance(body, Epoch | Follow):
            return "unsigned" in plan
        if not isinstance(body, Promise | Vote):
            return isinstance(body, BallotBody)
        if isinstance(body, Promise) and "votes" in plan:
            return False
        number = body.ballot.attempt
        turn = sorted({at.attempt for at in self.finality.book.prepares} | {0, number}).index(number)
        place = sum(member.is_liar for member in self.world.members[: self.number])
        return (turn + place) % 2 == 0
