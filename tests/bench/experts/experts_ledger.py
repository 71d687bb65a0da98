"""Ledgers of members that run without a network: every round is decided in them as a swarm decides it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import Ballot, Body, Contribution, Entry, Proposal, Vote, sign_entry
from atoll.protocols.run.run_spec import RunSpec


class Peer(NamedTuple):
    """A member, and the folder of its run."""

    identity: Identity
    folder: Path


class _Feeds:
    """What the members say in a round, each in its own feed."""

    def __init__(self, spec: RunSpec, peers: Sequence[Peer]) -> None:
        self._spec, self._peers = spec, {peer.identity.peer_id: peer for peer in peers}
        self._heads: dict[PeerId, Entry] = {}
        self.said: list[Entry] = []

    def say(self, author: PeerId, body: Body) -> Entry:
        """The author's next entry."""
        head, identity = self._heads.get(author), self._peers[author].identity
        seq, previous = (head.seq + 1, head.id) if head is not None else (0, b"")
        entry = self._heads[author] = sign_entry(self._spec.id, identity, seq, previous, body)
        self.said.append(entry)
        return entry

    def begin(self, at: int) -> tuple[PeerId, ...]:
        """Go on where the feeds ended; who decides the round, in their order."""
        ledger = Ledger(next(iter(self._peers.values())).folder / LEDGER_FILE, self._spec.id)
        heads = {peer: ledger.head(peer) for peer in self._peers}
        before = ledger.entries(kind=Proposal, number=at - 1) if at else []
        named = [ledger.get(name) for entry in before for name in _names(entry)]
        ledger.close()
        self._heads = {peer: head for peer, head in heads.items() if head is not None}
        authors = [entry.author for entry in named if entry is not None]
        return voter_order(self._spec.id, at, authors or [self._spec.owner])

    def spread(self) -> None:
        """To all."""
        for peer in self._peers.values():
            ledger = Ledger(peer.folder / LEDGER_FILE, self._spec.id)
            ledger.insert_all(self.said)
            ledger.close()


def decide(
    spec: RunSpec,
    peers: Sequence[Peer],
    at: int,
    contributed: Sequence[tuple[PeerId, Contribution]],
    state: Digest,
) -> None:
    """All contribute, the first in turn proposes, and every decider votes. The run's owner is one of `peers`."""
    feeds = _Feeds(spec, peers)
    deciders = feeds.begin(at)
    names = tuple(sorted(feeds.say(author, body).id for author, body in contributed))
    ballot = Ballot(0, deciders[0])
    proposed = feeds.say(deciders[0], Proposal(Round(at), ballot, names, state))
    for decider in deciders:
        feeds.say(decider, Vote(Round(at), ballot, proposed.id))
    feeds.spread()


def _names(entry: Entry) -> tuple[Digest, ...]:
    assert isinstance(entry.body, Proposal)
    return entry.body.contributions
