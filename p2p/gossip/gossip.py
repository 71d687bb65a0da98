"""Gossip: carries each new message to all members of a run along push trees.

Delivery is best effort: anti-entropy brings messages that a full queue or a rate limit drops. The topic's `accept`
decides whether a message is new; a PeerFault that it raises counts against the peer that sent the message.
"""

import asyncio
import math
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from atoll.p2p.gossip.push_trees import ID_BYTES, Actions, Ids, PushTrees
from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.protocols.ids import PeerId, digest

MESSAGES_PER_MINUTE = 200 * 60
MESSAGES_BURST = 2000
"""Burst allowed to one neighbour: more than a round of a hundred members needs. The rest is dropped, no fault."""
RECENT_BYTES = 2 * 1024 * 1024
"""Bytes of the newest messages that are sent on request; older ones are left to anti-entropy."""
_IDS_BYTES_OF_A_MESSAGE = 512
"""Ids count in the rate by what they cost: so many bytes of them take as long as the signature of one message."""
_HEADER_BYTES = 8

AcceptMessage = Callable[[PeerId, bytes], PeerId | None]
N = TypeVar("N")


class Notices(Protocol):
    """What gossip needs of `Calls`."""

    def register_notice(
        self,
        method: str,
        message: type[N],
        handler: Callable[[PeerId, N], Awaitable[None]],
        *,
        max_bytes: int = ...,
    ) -> None:
        """Receive one-way notices of a method."""

    def notify(self, peer: PeerId, method: str, message: Any) -> None:
        """Queue a notice without waiting."""


class Timer(Protocol):
    """A call to come."""

    def cancel(self) -> None:
        """Never make it."""


def _of_running_loop(seconds: float, call: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, call)


@dataclass(eq=False)
class Gossip:
    """Sends messages over `calls` to the peers that `neighbours` returns."""

    me: PeerId
    calls: Notices
    neighbours: Callable[[], Collection[PeerId]]
    now: Callable[[], float]
    rng: random.Random
    call_later: Callable[[float, Callable[[], None]], Timer] = _of_running_loop
    """Makes a call after so many seconds; a simulation has its own clock."""

    def __post_init__(self) -> None:
        self._trees = PushTrees(self.me, self.rng)
        self._recent: OrderedDict[bytes, tuple[str, bytes]] = OrderedDict()
        """Topic and bytes of the newest messages by id."""
        self._recent_bytes = 0
        self._rate = PeerRateLimit(MESSAGES_PER_MINUTE, self.now, MESSAGES_BURST)
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self.calls.register_notice("gossip.ids", Ids, self._on_ids)

    def subscribe(self, topic: str, accept: AcceptMessage, *, max_bytes: int) -> None:
        """Receive `topic`. `accept(sender, data)` returns the author of a message to pass on, None for no news.

        It raises PeerFault for illegal bytes.
        """

        async def receive(sender: PeerId, data: bytes) -> None:
            self._receive(topic, accept, sender, data)

        self.calls.register_notice(f"gossip.{topic}", bytes, receive, max_bytes=max_bytes + _HEADER_BYTES)

    def publish(self, topic: str, data: bytes, author: PeerId) -> None:
        """Send a new message: our own, or one that an exchange brought."""
        self._pass_on(topic, data, None, author)

    def forget(self, peer: PeerId) -> None:
        """Drop the state of a peer that is gone."""
        self._trees.lose(peer)

    def _receive(self, topic: str, accept: AcceptMessage, sender: PeerId, data: bytes) -> None:
        if not self._rate.take(sender):
            return
        name = _name(topic, data)
        if name in self._trees.known:
            self._trees.repeat(name, sender, self.now())
            self._perform([])
            return
        author = None
        try:
            author = accept(sender, data)
        finally:  # an illegal message is remembered, too
            self._pass_on(topic, data, sender, author)

    async def _on_ids(self, sender: PeerId, ids: Ids) -> None:
        cost = 1 + sum(map(len, (ids.have, ids.want, ids.prune))) // _IDS_BYTES_OF_A_MESSAGE
        if self._rate.take(sender, cost) and sender in self.neighbours():
            self._perform(self._trees.hear(sender, ids, self.now()))

    def _pass_on(self, topic: str, data: bytes, sender: PeerId | None, author: PeerId | None) -> None:
        name = _name(topic, data)
        if author is not None and name not in self._recent:
            self._recent[name] = topic, data
            self._recent_bytes += len(data)
            while self._recent_bytes > RECENT_BYTES:
                self._drop_oldest()
        actions = self._trees.arrive(name, sender, author, self.neighbours(), self.now())
        while self._recent and next(iter(self._recent)) not in self._trees.known:
            self._drop_oldest()  # nobody is told of it any more
        self._perform(actions)

    def _drop_oldest(self) -> None:
        _, (_, data) = self._recent.popitem(last=False)
        self._recent_bytes -= len(data)

    def _perform(self, actions: Actions) -> None:
        """Send what `actions` say, and come back when the trees are due."""
        for peer, what in actions:
            if isinstance(what, Ids):
                self.calls.notify(peer, "gossip.ids", what)
            elif what in self._recent:
                topic, data = self._recent[what]
                self.calls.notify(peer, f"gossip.{topic}", data)
        if self._trees.due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = self._trees.due
            pause_s = max(0.0, self._timer_at - self.now())
            self._timer = self.call_later(pause_s, self._tick)

    def _tick(self) -> None:
        self._timer_at = math.inf
        self._perform(self._trees.tick(self.now()))


def _name(topic: str, data: bytes) -> bytes:
    return digest(topic.encode(), b"\0", data)[:ID_BYTES]
