"""A virtual world: nodes, links, payloads and time, all drawn from one seed."""

import hashlib
import random
from dataclasses import dataclass
from functools import cache, partial

from atoll.node.daemon.rounds.state import RoundConfig
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import encode_entry, sign_entry
from atoll.protocols.ledger.registers import Lease, sign_register
from atoll_bench.simulator.clock import Clock
from atoll_bench.simulator.feeds import FeedEntry
from atoll_bench.simulator.leases import VirtualLease
from atoll_bench.simulator.liars import Liar, TurnTaker
from atoll_bench.simulator.links import Links
from atoll_bench.simulator.member import Member
from atoll_bench.simulator.mesh import Mesh

STEPS = 12
"""Inner steps of a round, as the round machine sees them."""
PLANS = ("votes", "votes unsigned", "answers", "answers unsigned")
START_S = 60.0
"""Within so long the first nodes start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a world is made of. The same setting gives the same trace."""

    seed: int
    nodes: int = 30
    minutes: float = 20.0
    liars: int = 0
    lease_s: float = 60.0
    """As of the presets, like the quorum and the grace of `round_config`."""
    train_s: float = 60.0
    """A round's steps on the slowest node; the fastest needs half of it."""
    ahead: float = 0.0
    """Share of a round that may be trained before the round before is folded; 0: rounds do not overlap."""
    rounds: int = 10_000
    plan: str = ""
    """What liars that answer ballots in turn keep back (`PLANS`); empty: they lie in other ways."""
    followers: int | None = None
    """With a number: records travel by the product's gossip, through so many more nodes that train nothing."""

    @property
    def run(self) -> RunId:
        return RunId(digest(b"virtual run", self.seed.to_bytes(8, "big", signed=True)))

    def round_config(self, me: PeerId) -> RoundConfig:
        """The round machine's constants, with the presets' pace."""
        overlap_steps = round(STEPS * self.ahead)
        return RoundConfig(me, self.rounds, 192, 128, self.lease_s, overlap_steps=overlap_steps, least_256=64)


@cache
def identity_of(number: int) -> Identity:
    """The keys of a node."""
    return Identity(digest(b"virtual node", number.to_bytes(4, "big")))


@cache
def peer_of(number: int) -> PeerId:
    """The identity of a node."""
    return identity_of(number).peer_id


class World:
    """All nodes of one simulation, and who reaches whom."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rng = random.Random(setting.seed)
        self.clock = Clock()
        self.links = Links(self.rng, setting.nodes)
        liars = set(self.rng.sample(range(1, setting.nodes), setting.liars))
        of_liars = TurnTaker if setting.plan else Liar
        self.members: list[Member] = [
            (of_liars if number in liars else Member)(
                self, number, peer_of(number), setting.train_s * self.rng.uniform(0.5, 1.0)
            )
            for number in range(setting.nodes)
        ]
        self.by_peer = {member.peer: member for member in self.members}
        self.owner = self.members[0].peer
        self.holders: dict[Digest, set[int]] = {}
        """Nodes that have a payload and serve it."""
        self.started: dict[int, float] = {}
        """When the first node began each round."""
        self.mesh: Mesh | None = None
        if setting.followers is not None:
            peers = [peer_of(number) for number in range(setting.nodes + setting.followers)]
            self.mesh = Mesh(self.clock, peers, setting.seed, self._receive)
        self._names: dict[Digest, list[Digest]] = {}
        self._trace = hashlib.blake2b(digest_size=16)
        self.topology = 0
        """Changes whenever connections may have come or gone."""

    def begin(self, late: int = 0) -> None:
        """Start all nodes but the last `late` ones, the owner first."""
        self.members[0].boot()
        for member in self.members[1 : self.setting.nodes - late]:
            self.clock.after(self.rng.uniform(2.0, START_S), member.boot)

    def forget(self) -> None:
        """End the world: without the circles that hold it, it dies with its last reference."""
        for member in self.members:
            vars(member).clear()
        vars(self).clear()

    def trace(self, what: str, number: int, *facts: object) -> None:
        """Add something that happened to the trace."""
        self._trace.update(f"{self.clock.now:.4f} {what} {number} {facts}\n".encode())

    def change_topology(self) -> None:
        """Connections come or go now, and once more when a cut is noticed."""
        self.topology += 1
        self.clock.after(self.links.LOST_AFTER_S + 0.001, self._on_cut_noticed)

    def _on_cut_noticed(self) -> None:
        self.topology += 1

    def digest(self) -> str:
        """Digest of all that happened so far: equal for equal settings."""
        return self._trace.hexdigest()

    # --- who reaches whom -------------------------------------------------------------------------

    def is_reachable(self, member: Member, other: Member) -> bool:
        """Whether the other one answers now."""
        return other.is_up and other.frozen is None and self.links.joins(member.number, other.number)

    def reachable(self, member: Member) -> list[Member]:
        """The nodes that answer this one now."""
        up = [other for other in self.members if other.is_up and other.frozen is None and other is not member]
        return up if self.links.are_whole else [o for o in up if self.links.joins(member.number, o.number)]

    def is_connected(self, member: Member, peer: PeerId) -> bool:
        """Whether this node believes that its connection to a peer stands: a cut shows only after a while."""
        other, links = self.by_peer[peer], self.links
        if not other.is_up or links.are_whole:
            return other.is_up
        fresh = self.clock.now - links.blocked_since < links.LOST_AFTER_S
        return fresh or links.joins(member.number, other.number)

    def heard_by(self, member: Member) -> list[Member]:
        """The nodes that a message of this one gets to."""
        links, number = self.links, member.number
        up = [other for other in self.members if other.is_up and other is not member]
        if links.loss == 0.0 and links.are_whole:
            return up
        return [other for other in up if links.passes(number, other.number) and not links.is_lost()]

    def expects_nobody(self, member: Member) -> bool:
        """Whether a node is the first one of the run."""
        return member.number == 0 and not member.feeds.arrivals

    # --- entries and payloads ---------------------------------------------------------------------

    def push(self, member: Member, entry: FeedEntry) -> None:
        """Send an entry to everybody that is reached."""
        if self.mesh is not None:
            signed = sign_entry(
                self.setting.run, identity_of(member.number), entry.seq, entry.previous, entry.body
            )
            self.mesh.publish(member.number, "entry", encode_entry(signed), entry)
            return
        now, number, links = self.clock.now, member.number, self.links
        for other in self.heard_by(member):
            other.arrive(now + links.delay_s(number, other.number), entry)

    def push_lease(self, member: Member, lease: VirtualLease) -> None:
        """Send a lease to everybody that is reached."""
        if self.mesh is None:
            for other in self.heard_by(member):
                other.leases.hear(member.peer, lease)
            return
        final = Round(member.worker.applied)
        value = Lease(lease.activity, lease.round, final, b"", Round(-1), 0.0)
        seq = round(1000 * self.clock.now)
        signed = sign_register(self.setting.run, identity_of(member.number), 1, seq, self.setting.lease_s, value)
        self.mesh.publish(member.number, "register", codec.encode(signed), (member.peer, lease))

    def _receive(self, number: int, item: object) -> None:
        """Gossip brought a record to a node."""
        if number >= len(self.members) or not self.members[number].is_up:
            return
        member = self.members[number]
        if isinstance(item, FeedEntry):
            member.arrive(self.clock.now, item)
        elif isinstance(item, tuple):
            member.leases.hear(*item)

    def transfer_s(self, member: Member, other: Member) -> float:
        """Seconds until a payload from this node is there."""
        slowness = self.links.slowness
        return self.rng.uniform(0.3, 3.0) * max(slowness[member.number], slowness[other.number])

    def can_serve(self, member: Member, payload: Digest) -> bool:
        """Whether somebody that holds a payload answers this node."""
        holders = self.holders.get(payload, ())
        return any(self.is_reachable(member, self.members[number]) for number in holders)

    def name_payload(self, payload: Digest, entry: FeedEntry) -> None:
        """A contribution names this payload."""
        self._names.setdefault(payload, []).append(entry.name)

    def names_of(self, payload: Digest) -> list[Digest]:
        """Entry ids of the contributions that name a payload."""
        return self._names.get(payload, [])

    def drop_payloads(self, member: Member, before: int) -> None:
        """A node deletes the payloads of all rounds before this one."""
        old = [name for name, (_, body) in member.known.items() if body.round < before]
        for name in old:
            payload = member.known[name][1].payload
            member.payloads.discard(payload)
            self.holders.get(payload, set()).discard(member.number)

    def on_round_started(self, number: int) -> None:
        """A node begins to train a round."""
        if self.mesh is not None and number not in self.started:
            self.mesh.mark(number)
        self.started.setdefault(number, self.clock.now)

    def return_later(self, member: Member, seconds: float) -> None:
        """Start a node again after a while."""
        self.clock.after(seconds, partial(Member.boot, member))
