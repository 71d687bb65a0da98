"""Nodes that decide with `push_trees` on simulated time: slow links, hostile nodes, connections that break."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from atoll.p2p.gossip.push_trees import Ids, PushTrees
from atoll.protocols.ids import PeerId


class Arrived(NamedTuple):
    id: bytes
    sender: PeerId | None
    author: PeerId | None
    neighbours: Collection[PeerId]


class Repeated(NamedTuple):
    id: bytes
    sender: PeerId


class Told(NamedTuple):
    sender: PeerId
    ids: Ids


class Lost(NamedTuple):
    peer: PeerId


class Ticked(NamedTuple):
    pass


Event = Arrived | Repeated | Told | Lost | Ticked


class Push(NamedTuple):
    peer: PeerId
    id: bytes


class Tell(NamedTuple):
    peer: PeerId
    ids: Ids


def step(trees: PushTrees, event: Event, now: float) -> list[Push | Tell]:
    """One event of a node."""
    match event:
        case Arrived(name, sender, author, near):
            actions = trees.arrive(name, sender, author, near, now)
        case Repeated(name, sender):
            actions = trees.repeat(name, sender, now) or []
        case Told(sender, ids):
            actions = trees.hear(sender, ids, now)
        case Lost(lost):
            actions = trees.lose(lost) or []
        case _:
            actions = trees.tick(now)
    return [Tell(to, what) if isinstance(what, Ids) else Push(to, what) for to, what in actions]


def peer(number: int) -> PeerId:
    return PeerId(f"peer{number:02}")


def message_id(number: int) -> bytes:
    return number.to_bytes(8, "big")


class Sim:
    """`delays`: seconds one way by pair of node numbers; a pair that is not in it is not connected."""

    def __init__(self, delays: dict[tuple[int, int], float], seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.delays = {
            pair: s for (a, b), s in delays.items() for pair in ((peer(a), peer(b)), (peer(b), peer(a)))
        }
        names = sorted({name for pair in self.delays for name in pair})
        self._near = {name: [b for a, b in self.delays if a == name] for name in names}
        self._due = dict.fromkeys(names, math.inf)
        self.nodes = {name: PushTrees(name, random.Random(f"{seed} {name}")) for name in names}
        self.hostile: dict[PeerId, Callable[[Sim, PeerId, Event], None]] = {}
        self.late = lambda: 0.0
        """Seconds that the next message takes more than its link's delay."""
        self.arrivals: dict[bytes, dict[PeerId, float]] = {}
        self.author: dict[bytes, PeerId] = {}
        self.copies: Counter[bytes] = Counter()
        self.sent: Counter[str] = Counter()
        """Messages, notices and ids that were sent."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._last: dict[tuple[PeerId, PeerId], float] = {}

    def neighbours(self, name: PeerId) -> list[PeerId]:
        return self._near[name]

    def at(self, when: float, act: Callable[..., None], *words: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), partial(act, *words)))

    def publish(self, number: int, author: PeerId) -> None:
        name = message_id(number)
        self.author[name] = author
        self.arrivals[name] = {author: self.now}
        self.event(author, Arrived(name, None, author, self.neighbours(author)))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until

    def event(self, name: PeerId, event: Event) -> None:
        state = self.nodes[name]
        for action in step(state, event, self.now):
            self.send(name, action)
        if state.due < self._due[name]:
            self._due[name] = state.due
            self.at(state.due, self._tick, name)

    def send(self, source: PeerId, action: Push | Tell) -> None:
        """Streams keep the order of what is sent."""
        link = (source, action.peer)
        if link not in self.delays:
            return
        if isinstance(action, Push):
            self.sent["messages"] += 1
        else:
            self.sent["notices"] += 1
            self.sent["ids"] += sum(len(ids) for ids in (action.ids.have, action.ids.want, action.ids.prune)) // 8
        self._last[link] = max(self._last.get(link, 0.0), self.now + self.delays[link] + self.late())
        self.at(self._last[link], self._deliver, source, action)

    def cut(self, a: PeerId, b: PeerId) -> None:
        """The connection breaks: what is under way is lost."""
        for source, target in ((a, b), (b, a)):
            del self.delays[source, target]
            self._near[source].remove(target)
            self.event(source, Lost(target))

    def _deliver(self, source: PeerId, action: Push | Tell) -> None:
        target = action.peer
        if (source, target) not in self.delays:
            return
        if isinstance(action, Push):
            self.copies[action.id] += 1
            if action.id in self.nodes[target].known:
                event: Event = Repeated(action.id, source)
            else:
                event = Arrived(action.id, source, self.author.get(action.id), self.neighbours(target))
                self.arrivals.setdefault(action.id, {})[target] = self.now
        else:
            event = Told(source, action.ids)
        if target in self.hostile:
            self.hostile[target](self, target, event)
        else:
            self.event(target, event)

    def _tick(self, name: PeerId) -> None:
        self._due[name] = math.inf
        self.event(name, Ticked())
