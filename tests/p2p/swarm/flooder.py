"""A peer that brings made-up authors to others: entries and leases, by gossip and in every exchange.

For worlds under `run_virtual`: its pace is that of virtual time.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from atoll.p2p.exchange.sync import MESSAGE_BYTES, METHOD, Exchange
from atoll.p2p.gossip.gossip import MESSAGES_PER_MINUTE
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.register_sync import MESSAGE_BYTES as PULL_BYTES
from atoll.p2p.membership.register_sync import METHOD as PULL
from atoll.p2p.membership.register_sync import KnownVersions, RegisterBatch
from atoll.p2p.rpc.calls import Calls
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import (
    Ack,
    Ballot,
    Body,
    Contribution,
    Entry,
    Epoch,
    Exclude,
    Follow,
    Prepare,
    Promise,
    Proposal,
    SlicedContribution,
    Vote,
    decode_entry,
    encode_entry,
    sign_entry,
)
from atoll.protocols.ledger.registers import Lease, sign_register


def fake_work(number: int, who: bytes = b"", *, sliced: bool = False) -> Contribution:
    """A contribution whose payload nobody has."""
    names = Round(number), digest(b"base"), digest(b"payload", who)
    if sliced:
        return SlicedContribution(*names, 1, 1, 64, 1.0, Digest(bytes(32)))
    return Contribution(*names, 1, 1, 64, 1.0)


def anything(number: int) -> "BodiesOf":
    """A contribution that nobody can fold, then something else that costs a node memory or time, by turns.

    About this round, or rounds near it; Epochs and Proposals have as many names as fit.
    """
    names = tuple(sorted(Digest(digest(at.to_bytes(2, "big"))) for at in range(1000)))

    def bodies_of(author: PeerId, at: int) -> list[Body]:
        ballot, choice = Ballot(at % 50, author), names[at % len(names)]
        others: list[Body] = [
            Epoch(Round(number), b"", tuple(sorted({author, *_MEMBERS}))),
            Proposal(Round(number), ballot, names, choice),
            Prepare(Round(number + at % 40), ballot),
            Promise(Round(number), ballot, (choice,)),
            Vote(Round(number), ballot, choice),
            Follow(Round(number), choice),
            Exclude(Round(number), _MEMBERS[at % len(_MEMBERS)], "it trains too well"),
            Ack(Round(number), choice, choice),
        ]
        return [fake_work(number, author.encode()), others[at % len(others)]]

    return bodies_of


_MEMBERS = [Identity(digest(at.to_bytes(2, "big"))).peer_id for at in range(100)]
BodiesOf: TypeAlias = Callable[[PeerId, int], Sequence[Body]]


class Flooder:
    """Made-up authors, each with one feed, and a lease."""

    def __init__(
        self,
        run: RunId,
        count: int,
        bodies: Sequence[Body] | BodiesOf,
        seed: int = 1,
        offer: tuple[Round, Digest] | None = None,
    ) -> None:
        """`bodies`: those of each author, or what makes them of its PeerID and number.

        `offer`: the round and the blob id of a snapshot that all leases offer, and nobody has.
        """
        rng = random.Random(seed)
        self.run, self.rng = run, rng
        self.authors = [Identity(rng.randbytes(32)) for _ in range(count)]
        self.entries: list[bytes] = []
        self.leases: list[bytes] = []
        self.sent = 0
        newest, snapshot = offer or (Round(-1), b"")
        for at, author in enumerate(self.authors):
            previous = b""
            own = bodies(author.peer_id, at) if callable(bodies) else bodies
            for seq, body in enumerate(own):
                entry = sign_entry(run, author, seq, previous, body)
                self.entries.append(encode_entry(entry))
                previous = entry.id
            lease = Lease("training", own[0].round, newest, snapshot, newest, 10.0)
            self.leases.append(codec.encode(sign_register(run, author, 1, 1, 600.0, lease)))

    def decoded(self) -> list[Entry]:
        """The entries, as a ledger takes them."""
        return [decode_entry(data, self.run) for data in self.entries]

    async def serve(self, host: Host, victims: Sequence[PeerAddress]) -> None:
        """Flood the victims until cancelled: as fast as gossip listens, first all entries once, then at random."""
        calls = Calls(host, self.run, on_fault=lambda peer, fault: None)
        calls.register(METHOD, Exchange, Exchange, self._exchange, max_bytes=MESSAGE_BYTES)
        calls.register(PULL, KnownVersions, RegisterBatch, self._pull, max_bytes=PULL_BYTES)
        async with asyncio.TaskGroup() as group:
            up = asyncio.Event()
            group.create_task(host.serve(up.set))
            await up.wait()
            group.create_task(calls.serve())
            await calls.started.wait()
            for victim in victims:
                await host.connect(victim)
            while True:
                for victim in victims:
                    calls.notify(victim.peer, "gossip.entry", self.entries[self.sent % len(self.entries)])
                    if self.sent % 8 == 0:
                        calls.notify(victim.peer, "gossip.register", self.leases[self.sent % len(self.leases)])
                self.sent += 1
                await asyncio.sleep(1.2 * 60.0 / MESSAGES_PER_MINUTE)

    async def _exchange(self, peer: object, theirs: Exchange) -> Exchange:
        some = self.rng.sample(self.entries, min(300, len(self.entries)))
        return Exchange({}, False, (), tuple(some), ())

    async def _pull(self, peer: object, known: KnownVersions) -> RegisterBatch:
        return RegisterBatch(
            tuple((0.0, data) for data in self.rng.sample(self.leases, min(64, len(self.leases))))
        )
