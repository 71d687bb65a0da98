"""Push trees: which neighbours get a message at once, which get its id, and who is asked for a missing message.

Each author has a tree of its own. A node pushes an author's first message to a few neighbours and announces ids
to the others. A receiver lets the two fastest senders go on (one may be slow, lossy or hostile) and prunes the
rest. If an announced message is not pushed here in time, this node asks one announcer after the other for it; the
one that answers pushes this author's messages from then on. Source: Plumtree (Leitão, Pereira, Rodrigues, 2007).

Pure: every event changes the state and returns what is to be sent; time and randomness are arguments.
"""

import math
import random
from collections import OrderedDict, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import PeerId

ID_BYTES = 8
"""Enough against chance. With 2³² hashes an author makes two messages of one id, and gossip carries one of them;
the id of another author's message needs 2⁶⁴."""
IDS_MAX = 1024
"""Most ids in one list of a notice."""
FIRST_PUSHES = 6
"""Neighbours that get another author's first message at once; more would only be pruned."""
OWN_PUSHES = 16
"""Neighbours that get our own first message at once."""
SENDERS = 2
"""Neighbours that push an author's messages to us."""
ANNOUNCE_S = 0.5
"""Age at which a message is announced: ids of messages that are published together travel together."""
WAIT_S = 0.3
"""Time that an announced message has to be pushed here, before it is asked for."""
ANSWER_S = 2.0
"""Deadline of an answer, in seconds; then the next announcer is asked."""
STRIKES = 8
"""Unanswered requests in a row after which a neighbour's announcements are ignored, until it brings news."""
KNOWN = 1 << 14
"""Number of messages that are remembered at most: those of twenty rounds of a hundred members."""
KNOWN_S = 120.0
"""How long a message is remembered, in seconds: as gossipsub does (libp2p, pubsub/gossipsub v1.0, seen_ttl). Who
sends it later is not believed anew: the topic's `accept` knows what is news, and an id costs one answer."""
AUTHORS = 1000
WANTED = 1024
"""Most announced ids that are waited for."""
WANTED_OF_ONE = 256
"""Most ids that one neighbour was the first to announce and that are waited for."""
ANNOUNCERS = 8
"""Most announcers of one id that are remembered."""
IdList = Annotated[bytes, Meta(max_length=IDS_MAX * ID_BYTES)]


class Ids(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Body of a notice `gossip.ids`: lists of message ids, each list as one byte string."""

    have: IdList = b""
    """The sender has these messages."""
    want: IdList = b""
    """Send these, and push their authors' messages from now on."""
    prune: IdList = b""
    """Push no more messages of these ones' authors: others are faster."""

    def __post_init__(self) -> None:
        if any(len(ids) % ID_BYTES for ids in (self.have, self.want, self.prune)):
            raise ValueError("a list of ids with a part of an id")


Push = tuple[PeerId, bytes]
"""Send the message of this id to the peer."""
Tell = tuple[PeerId, Ids]
"""Send the peer a notice of ids."""
Actions = list[Push | Tell]


@dataclass(slots=True)
class _Known:
    author: PeerId | None
    """None: the message is not passed on."""
    senders: tuple[PeerId, ...]
    """The first neighbours that pushed it or were asked to, at most SENDERS."""
    at: float
    """When it arrived."""


@dataclass(slots=True)
class _Wanted:
    first: PeerId
    """The neighbour whose quota it counts against."""
    due: float
    announcers: list[PeerId]
    """Neighbours that were not asked yet."""
    asked: PeerId | None = None


@dataclass(slots=True)
class _Neighbour:
    have: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Ids that wait to be announced."""
    prune: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    offered: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Announced ids. Each is sent once if it is asked for: nobody makes us send a message again and again."""
    wanted: int = 0
    """Number of ids that it was the first to announce and that are waited for."""
    strikes: int = 0


@dataclass(slots=True)
class PushTrees:
    """State of one node; all of it is bounded. `now` is a monotonic clock in seconds."""

    me: PeerId
    rng: random.Random
    known: OrderedDict[bytes, _Known] = field(default_factory=OrderedDict)
    lazy: OrderedDict[PeerId | None, set[PeerId]] = field(default_factory=OrderedDict)
    """Neighbours that get only ids, by author; all others get the messages."""
    wanted: dict[bytes, _Wanted] = field(default_factory=dict)
    neighbours: defaultdict[PeerId, _Neighbour] = field(default_factory=lambda: defaultdict(_Neighbour))
    announce_at: float = math.inf
    """When ids that wait are sent."""
    request_at: float = math.inf
    """When a message that is waited for is due; never later than the first."""

    @property
    def due(self) -> float:
        """When the next `tick` is worth while; infinite: not before another event."""
        return min(self.announce_at, self.request_at)

    def arrive(
        self, name: bytes, sender: PeerId | None, author: PeerId | None, near: Collection[PeerId], now: float
    ) -> Actions:
        """A message that was unknown: pushed by `sender`, or (None) published here. `near`: the neighbours."""
        wanted = self._forget_wanted(name)
        put_newest(self.known, name, _Known(author, () if sender is None else (sender,), now), KNOWN)
        while next(iter(self.known.values())).at < now - KNOWN_S:
            self.known.popitem(last=False)
        if author is None:
            return []
        for gone in self.neighbours.keys() - {*near}:
            self.lose(gone)
        if sender is not None:
            self.neighbours[sender].strikes = 0
        asks = self._second_sender(name, wanted) if wanted is not None and wanted.asked is not None else []
        others = sorted(peer for peer in near if peer != sender and not (wanted and peer in wanted.announcers))
        lazy = self.lazy.get(author)
        if lazy is None:
            pushes = OWN_PUSHES if author == self.me else FIRST_PUSHES
            lazy = set(self.rng.sample(others, max(0, len(others) - pushes)))
        put_newest(self.lazy, author, lazy, AUTHORS)
        for peer in others:
            if peer in lazy:
                self._queue(self.neighbours[peer].have, name, now)
        return [*asks, *((peer, name) for peer in others if peer not in lazy)]

    def repeat(self, name: bytes, sender: PeerId, now: float) -> None:
        """A known message was pushed again; its third sender is asked to stop."""
        message, neighbour = self.known[name], self.neighbours[sender]
        neighbour.have.pop(name, None)
        if message.author is None or sender in message.senders:
            return
        if message.author == self.me or len(message.senders) >= SENDERS:
            self._queue(neighbour.prune, name, now)
        else:
            message.senders += (sender,)

    def hear(self, sender: PeerId, ids: Ids, now: float) -> Actions:
        """A notice of ids came."""
        for each in _split(ids.prune):
            self._set_lazy(sender, each, is_lazy=True)
        offered, actions = self.neighbours[sender].offered, Actions()
        for each in _split(ids.want):
            if each in offered:
                del offered[each]
                self._set_lazy(sender, each, is_lazy=False)
                actions.append((sender, each))
        repairs = b"".join(each for each in _split(ids.have) if self._note_announced(sender, each, now))
        return [*actions, (sender, Ids(want=repairs))] if repairs else actions

    def lose(self, peer: PeerId) -> None:
        """The connection to a neighbour is gone."""
        self.neighbours.pop(peer, None)
        for lazy in self.lazy.values():
            lazy.discard(peer)

    def tick(self, now: float) -> Actions:
        """Ask for what is due and announce what waits."""
        return [*self._requests(now), *self._announcements(now)]

    def _note_announced(self, sender: PeerId, name: bytes, now: float) -> bool:
        """Note an announced id; whether the message is asked for at once, to get its author a second sender."""
        neighbour, message, wanted = self.neighbours[sender], self.known.get(name), self.wanted.get(name)
        if message is not None:
            neighbour.have.pop(name, None)
            lacks_one = message.author not in (None, self.me) and len(message.senders) < SENDERS
            if lacks_one and sender not in message.senders and neighbour.strikes < STRIKES:
                message.senders += (sender,)
                return True
        elif wanted is not None:
            if len(wanted.announcers) < ANNOUNCERS and sender not in (wanted.asked, *wanted.announcers):
                wanted.announcers.append(sender)
        elif neighbour.strikes < STRIKES and neighbour.wanted < WANTED_OF_ONE and len(self.wanted) < WANTED:
            neighbour.wanted += 1
            self.wanted[name] = _Wanted(sender, now + WAIT_S, [sender])
            self.request_at = min(self.request_at, now + WAIT_S)
        return False

    def _second_sender(self, name: bytes, late: _Wanted) -> Actions:
        """Ask another announcer, too: who answers as slowly as it may would stay the author's only sender."""
        if not (able := [peer for peer in late.announcers if peer in self.neighbours]):
            return []
        second = self.rng.choice(able)
        self.known[name].senders += (second,)
        return [(second, Ids(want=name))]

    def _set_lazy(self, peer: PeerId, name: bytes, *, is_lazy: bool) -> None:
        message = self.known.get(name)
        if message is not None and message.author in self.lazy:
            lazy = self.lazy[message.author]
            (lazy.add if is_lazy else lazy.discard)(peer)

    def _requests(self, now: float) -> Actions:
        """Ask the next announcer of each message that is due; forget messages without one."""
        asks: dict[PeerId, list[bytes]] = {}
        for name, wanted in [(name, wanted) for name, wanted in self.wanted.items() if wanted.due <= now]:
            if wanted.asked is not None and wanted.asked in self.neighbours:
                self.neighbours[wanted.asked].strikes += 1
            able = [p for p in wanted.announcers if p in self.neighbours and self.neighbours[p].strikes < STRIKES]
            if able:
                wanted.asked, *wanted.announcers = able
                wanted.due = now + ANSWER_S
                asks.setdefault(able[0], []).append(name)
            else:
                self._forget_wanted(name)
        self.request_at = min((wanted.due for wanted in self.wanted.values()), default=math.inf)
        return [(peer, Ids(want=b"".join(names))) for peer, names in asks.items()]

    def _announcements(self, now: float) -> Actions:
        """All ids that wait, once the oldest waited for ANNOUNCE_S."""
        if now < self.announce_at:
            return []
        self.announce_at = math.inf
        actions = Actions()
        for peer, each in self.neighbours.items():
            if each.have or each.prune:
                actions.append((peer, Ids(have=b"".join(each.have), prune=b"".join(each.prune))))
                for name in each.have:
                    put_newest(each.offered, name, None, IDS_MAX)
                # A message that is forgotten here cannot be sent any more.
                while each.offered and next(iter(each.offered)) not in self.known:
                    each.offered.popitem(last=False)
                each.have.clear()
                each.prune.clear()
        return actions

    def _queue(self, ids: OrderedDict[bytes, None], name: bytes, now: float) -> None:
        """Let an id wait for the next notice; of more than IDS_MAX the oldest is dropped."""
        put_newest(ids, name, None, IDS_MAX)
        self.announce_at = min(self.announce_at, now + ANNOUNCE_S)

    def _forget_wanted(self, name: bytes) -> _Wanted | None:
        wanted = self.wanted.pop(name, None)
        if wanted is not None and (first := self.neighbours.get(wanted.first)) is not None:
            first.wanted = max(0, first.wanted - 1)  # a neighbour that came back counts from 0
        return wanted


def _split(ids: bytes) -> list[bytes]:
    return [ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)]
