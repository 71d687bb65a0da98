"""Real gossip below a virtual world: the product's `Gossip` on every node, its frames, slow links, and a meter.

Nodes beyond the members train nothing: they receive records and pass them on. Each node opens connections to
`TARGET` random others, as the product does. Every connection keeps the order of its messages.
"""

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, cast

from atoll.p2p.discovery.discovery import TARGET
from atoll.p2p.exchange import sync
from atoll.p2p.gossip.gossip import Gossip
from atoll.p2p.membership import liveness, register_sync
from atoll.p2p.rpc import frames
from atoll.p2p.swarm.anti_entropy import EVERY_S
from atoll.protocols import codec
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import ENTRY_MAX_BYTES
from atoll.protocols.ledger.registers import REGISTER_MAX_BYTES
from atoll_bench.simulator.clock import Clock

DELAY_S = 0.005, 0.08
"""Seconds one way, drawn for each connection; as in tests/node/virtual/test_virtual_gossip.py."""
BYTES_PER_S = 20e6 / 8
MAX_BYTES = {"entry": ENTRY_MAX_BYTES, "register": REGISTER_MAX_BYTES}


class Record(NamedTuple):
    """A signed entry or register on its way."""

    topic: str
    author: PeerId
    item: object
    """What the receiving member gets."""
    born: float


class Totals(NamedTuple):
    """What all nodes sent so far, by kind."""

    sent_bytes: Counter[str]
    messages: Counter[str]
    records: Counter[str]
    """Records that were published, by topic."""
    at: float


class _Timer:
    """A call that can be cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        if self._call is not None:
            self._call()


class MeshNode:
    """The calls of one node, as its gossip sees them: notices become real frames and travel."""

    def __init__(self, mesh: "Mesh", number: int) -> None:
        self._mesh, self._number = mesh, number
        self.handlers: dict[str, Callable[[PeerId, Any], Awaitable[None]]] = {}

    def register_notice(
        self,
        method: str,
        message: type[Any],
        handler: Callable[[PeerId, Any], Awaitable[None]],
        *,
        max_bytes: int = 0,
    ) -> None:
        """Receive the notices of a method."""
        self.handlers[method] = handler

    def notify(self, peer: PeerId, method: str, message: Any) -> None:
        """Send a notice to a neighbour."""
        self._mesh.send(self._number, peer, method, message)


class Mesh:
    """All nodes' gossip. `receive(number, item)` gets what reaches a node for the first time."""

    def __init__(
        self, clock: Clock, peers: list[PeerId], seed: int, receive: Callable[[int, object], None]
    ) -> None:
        self._clock, self._peers, self._receive = clock, peers, receive
        self._rng = random.Random(seed)
        self._number = {peer: number for number, peer in enumerate(peers)}
        self.near = self._connect()
        self._delay: dict[tuple[int, int], float] = {}
        self._arrives: dict[tuple[int, int], float] = {}
        """When the newest message of each connection arrives."""
        self._records: dict[bytes, Record] = {}
        self.reached: dict[bytes, tuple[int, float]] = {}
        """How many other nodes each record reached, and when it reached the newest of them."""
        self.totals = Totals(Counter(), Counter(), Counter(), 0.0)
        self.marks: dict[int, Totals] = {}
        """Totals when each round began."""
        self._entries: Counter[PeerId] = Counter()
        self._registers: Counter[PeerId] = Counter()
        self._nodes = [MeshNode(self, number) for number in range(len(peers))]
        self._gossips = [self._gossip(number) for number in range(len(peers))]
        for number in range(len(peers)):
            self._clock.after(self._rng.uniform(0.0, EVERY_S), partial(self._exchange, number))

    def _connect(self) -> list[list[PeerId]]:
        count = len(self._peers)
        near: list[set[int]] = [set() for _ in range(count)]
        for number in range(count):
            others = [other for other in self._rng.sample(range(count), min(count, TARGET + 1)) if other != number]
            for other in others[:TARGET]:
                near[number].add(other)
                near[other].add(number)
        return [[self._peers[other] for other in sorted(each)] for each in near]

    def _gossip(self, number: int) -> Gossip:
        gossip = Gossip(
            self._peers[number],
            self._nodes[number],
            lambda: self.near[number],
            lambda: self._clock.now,
            random.Random(self._rng.random()),
            call_later=self._call_later,
        )
        for topic, most in MAX_BYTES.items():
            gossip.subscribe(topic, partial(self._accept, number), max_bytes=most)
        return gossip

    def _call_later(self, seconds: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(call)
        self._clock.after(seconds, timer.run)
        return timer

    # --- records ----------------------------------------------------------------------------------

    def publish(self, number: int, topic: str, data: bytes, item: object) -> None:
        """A member publishes an entry or a register."""
        author = self._peers[number]
        self._records[data] = Record(topic, author, item, self._clock.now)
        self.reached[data] = 0, self._clock.now
        self.totals.records[topic] += 1
        (self._entries if topic == "entry" else self._registers)[author] += 1
        self._gossips[number].publish(topic, data, author)

    def _accept(self, number: int, sender: PeerId, data: bytes) -> PeerId:
        record, now = self._records[data], self._clock.now
        self.reached[data] = self.reached[data][0] + 1, now
        self._receive(number, record.item)
        return record.author

    def send(self, sender: int, peer: PeerId, method: str, message: Any) -> None:
        """Carry a notice to a neighbour, and count its bytes."""
        receiver = self._number[peer]
        link = sender, receiver
        size = len(frames.notice(method, codec.encode(message)))
        self._count(method, size)
        if link not in self._delay:
            self._delay[link] = self._delay[link[::-1]] = self._rng.uniform(*DELAY_S)
        due = max(self._arrives.get(link, 0.0), self._clock.now + self._delay[link] + size / BYTES_PER_S)
        self._arrives[link] = due
        self._clock.after(due - self._clock.now, partial(self._deliver, sender, receiver, method, message))

    def _deliver(self, sender: int, receiver: int, method: str, message: Any) -> None:
        # A handler of notices waits for nothing (Calls.register_notice), so one step ends it.
        coroutine = cast(
            Coroutine[Any, Any, None], self._nodes[receiver].handlers[method](self._peers[sender], message)
        )
        try:
            coroutine.send(None)
        except StopIteration:
            return
        raise AssertionError("a handler of notices waited")

    def _count(self, kind: str, size: int) -> None:
        self.totals.sent_bytes[kind] += size
        self.totals.messages[kind] += 1

    # --- what does not depend on records ------------------------------------------------------------

    def _exchange(self, number: int) -> None:
        """Count an exchange of two nodes that have the same: its real messages, with all authors that wrote."""
        versions = tuple((author, "lease", 1, seq) for author, seq in sorted(self._registers.items()))
        asked = frames.request(1, register_sync.METHOD, codec.encode(register_sync.KnownVersions(versions)))
        self._count("registers.pull", len(asked))
        self._count("registers.pull", len(frames.reply(1, codec.encode(register_sync.RegisterBatch(())))))
        state = codec.encode(sync.Exchange(dict(sorted(self._entries.items())), False, (), (), ()))
        self._count("ledger.sync", len(frames.request(2, sync.METHOD, state)))
        self._count("ledger.sync", len(frames.reply(2, state)))
        self._clock.after(EVERY_S * self._rng.uniform(0.5, 1.5), partial(self._exchange, number))

    def mark(self, number: int) -> None:
        """A round begins: what was sent until now belongs to the rounds before."""
        sent, messages, records, _ = self.totals
        self.marks[number] = Totals(Counter(sent), Counter(messages), Counter(records), self._clock.now)

    def pings(self, seconds: float) -> tuple[int, int]:
        """Bytes and messages of the pings of all nodes in so many seconds: they depend on connections alone."""
        size = len(frames.request(1, "ping", codec.encode(b""))) + len(frames.reply(1, codec.encode(b"")))
        many = round(sum(map(len, self.near)) * seconds / liveness.EVERY_S)
        return many * size, 2 * many

    def dissemination(self, since: float, until: float) -> list[float]:
        """Seconds until each record that was born between had reached all other nodes, sorted."""
        others = len(self._peers) - 1
        found = [
            at - self._records[data].born
            for data, (many, at) in self.reached.items()
            if many == others and since <= self._records[data].born < until
        ]
        return sorted(found)

    def lost(self, since: float, until: float) -> int:
        """Records that were born between and have not reached all nodes."""
        others = len(self._peers) - 1
        born = [(many, self._records[data].born) for data, (many, _) in self.reached.items()]
        return sum(many < others for many, at in born if since <= at < until)
