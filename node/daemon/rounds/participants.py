"""Participants of a round: which members to wait for, how many are enough, where the others are.

All functions are pure. `members` are the live leases of others; this node is never among them.
"""

from collections.abc import Mapping, Set

import msgspec

from atoll.protocols.ids import Digest, PeerId, Round, RunId
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.ledger.set_limit import Arrivals, NewcomerOrder, Seniority, first_places
from atoll.protocols.remembered import remembered

SPANS_KEPT = 4
"""Answers of `taking_part` that leases remember: who is alone has the same ones for all rounds."""
NEWER_S = 1.0
"""Times at which leases began are rounded: by so much one is later than the loss of a connection."""


class MemberView(msgspec.Struct, frozen=True):
    """A member's live lease, and the monotonic second at which it was last received."""

    activity: Activity
    round: Round
    heard: float
    tokens_per_s: float = 0.0
    """The member's training speed; 0 while it is not known."""
    lost_at: float | None = None
    """Monotonic second at which this node lost its connection to the member. None: there is one, there never was,
    or the member was heard of since."""
    is_unreachable: bool = False
    """The connection is lost, and a dial since then failed."""
    round_s: float = 0.0
    """Seconds that the steps of its round take it, by the speed that it announces; 0: it announced none yet."""
    untried: bool = False
    """No work of this member was seen yet, though rounds of the run are final."""


class Members(dict[PeerId, MemberView]):
    """Live leases, as one event brought them. Nobody changes it, so what was found of it stays true."""

    @remembered
    def at_work(self) -> dict[tuple[int, int], set[PeerId]]:
        """What `taking_part` found. It is asked at every event, about the round at hand and the next one."""
        return {}


class SetRules(msgspec.Struct, frozen=True):
    """Whom this node's own sets name, where a round has more contributions than its set may name."""

    seniority: Seniority = Seniority()
    """Who comes first of more than any set may name."""
    order: NewcomerOrder = NewcomerOrder()
    """Which newcomers come first, of more than the run allows."""
    arrivals: Arrivals = Arrivals()
    """How the authors of verified payloads came; empty in runs that bound no newcomers."""

    def after(self, seniority: Seniority, order: NewcomerOrder) -> "SetRules":
        """The rules once more rounds are final."""
        return SetRules(seniority, order, self.arrivals.after(self.order.tally, order.tally))


class RoundBook(msgspec.Struct, frozen=True, dict=True):
    """The contributions to one round that the ledger knows, one of each author."""

    authors: Mapping[Digest, PeerId] = msgspec.field(default_factory=dict)
    """By entry id, in the order of arrival."""
    held: frozenset[Digest] = frozenset()
    """Those whose payload can be folded now."""

    @property
    def missing(self) -> list[Digest]:
        """Those whose payload cannot be folded yet, in the order of arrival."""
        return [entry for entry in self.authors if entry not in self.held]

    def without(self, author: PeerId) -> "RoundBook":
        """The book without the contribution of an author, unless it is held."""
        kept = {entry: who for entry, who in self.authors.items() if who != author or entry in self.held}
        return self if len(kept) == len(self.authors) else RoundBook(kept, self.held)

    def first(self, run: RunId, number: int, rules: "SetRules") -> tuple[Digest, ...]:
        """The set of those that can be folded now, sorted: its digest must not depend on the order of arrival."""
        key = run, number
        if key not in self._firsts or self._firsts[key][0] is not rules:
            named = rules.order.named(self.there, rules.arrivals)
            held = {entry: who for entry in self.held if (who := self.authors[entry]) in named}
            self._firsts[key] = rules, first_places(run, number, held, rules.seniority)
        return self._firsts[key][1]

    @remembered
    def _firsts(self) -> dict[tuple[RunId, int], tuple["SetRules", tuple[Digest, ...]]]:
        """What `first` found, and with which rules. It is asked at every event."""
        return {}

    @remembered
    def there(self) -> frozenset[PeerId]:
        """The authors of those that are held."""
        return frozenset(map(self.authors.__getitem__, self.held))


def taking_part(members: Mapping[PeerId, MemberView], number: int, ahead: int = 0) -> set[PeerId]:
    """The members that will still contribute to round `number`, and soon.

    `ahead` is the number of rounds that a peer may be further and still contribute: 0 without overlap. The set may
    be shared: nobody changes it.
    """
    # A peer in the round before arrives within about a round time; one further back would hold all up for longer.
    first, last = span = number - 1, number + ahead
    known = members.at_work if isinstance(members, Members) else {}
    if span not in known:
        if len(known) >= SPANS_KEPT:
            known.clear()
        known[span] = {
            peer for peer, view in members.items() if first <= view.round <= last and view.activity == "training"
        }
    return known[span]


def rounds_just_left(
    before: Mapping[PeerId, MemberView], now: Mapping[PeerId, MemberView], just_left: Mapping[PeerId, int]
) -> dict[PeerId, int]:
    """The round that a peer left, and so contributed to, for each peer that went on to the very next round."""
    # With overlap a peer goes on before its contribution arrives. A peer that leapt over rounds, or that was not
    # seen before, contributed to none that this node could wait for.
    found = {peer: left for peer, left in just_left.items() if peer in now and now[peer] is before.get(peer)}
    for peer, view in _renewed(before, now):
        was = before.get(peer)
        if was is None:
            continue
        if view.round == was.round:
            if peer in just_left:
                found[peer] = just_left[peer]
        # Who announces no speed has trained no round since its start: it was killed in the round that it left. The
        # lease of its start may be replaced too soon to be seen.
        elif view.round == was.round + 1 and was.activity == "training" and view.tokens_per_s > 0:
            found[peer] = int(was.round)
    return found


def rounds_entered(
    before: Mapping[PeerId, MemberView], now: Mapping[PeerId, MemberView], entered: Mapping[PeerId, float]
) -> dict[PeerId, float]:
    """When each peer was first seen in its round: its lease is renewed within the round, too."""
    found = {peer: at for peer, at in entered.items() if peer in now} if entered.keys() - now else {**entered}
    for peer, view in _renewed(before, now):
        found[peer] = entered[peer] if peer in before and before[peer].round == view.round else view.heard
    return found


def _renewed(
    before: Mapping[PeerId, MemberView], now: Mapping[PeerId, MemberView]
) -> list[tuple[PeerId, MemberView]]:
    """The leases that are new: those of all others are the same objects, and say the same."""
    was = before.get
    return [(peer, view) for peer, view in now.items() if was(peer) is not view]


def expected(
    me: PeerId, number: int, book: RoundBook, members: Mapping[PeerId, MemberView], just_left: Mapping[PeerId, int]
) -> set[PeerId]:
    """The authors whose contributions round `number` waits for, this node included."""
    # A payload that is missing is awaited while its author lives: after that perhaps no peer can serve it.
    awaited = taking_part(members, number) | book.there
    awaited.add(me)
    if len(book.held) < len(book.authors):
        awaited.update(filter(members.__contains__, book.authors.values()))
    if just_left:
        awaited.update([peer for peer, left in just_left.items() if left == number and peer in members])
    return awaited


def quorum_of(count: int, quorum_256: int) -> int:
    """The number of contributions that makes a quorum of `count` expected ones: rounded up, at least one."""
    return max(1, -(-count * quorum_256 // 256))


def slot_of(me: PeerId, number: int, members: Mapping[PeerId, MemberView], ahead: int = 0) -> tuple[int, int]:
    """Our place among the sorted members that train round `number`, and their count: they select the data."""
    peers = sorted({me} | taking_part(members, number, ahead))
    return peers.index(me), len(peers)


def are_at_least_half(count: int, others: int) -> bool:
    """Whether `count` of the `others` are at least half of all members, this node included."""
    # So of three members one alone leads nobody.
    return 2 * count > others


def frontier(first: int, last: int, books: Mapping[int, RoundBook], others: Set[PeerId]) -> int:
    """Newest round in `first … last` to which half of all contributed, this node included; else first - 1.

    `others`: the members that count, without this node.
    """
    newest, number = first - 1, first
    while others and number <= last:
        authors = books[number].there if number in books else frozenset[PeerId]()
        if not authors:  # it could never become final: one peer cannot pull the others over a gap
            break
        if are_at_least_half(len(authors & others), len(others)):
            newest = number
        number += 1
    return newest


def shown_activity(activity: Activity, refusal: str) -> Activity:
    """The activity of a node's lease; `refusal`: what its disk refuses, so that its work would come for nobody."""
    return "paused" if refusal and activity == "training" else activity


def without_newer_leases(
    times: Mapping[PeerId, float], members: Mapping[PeerId, MemberView]
) -> dict[PeerId, float]:
    """The times, in monotonic seconds, of those members of which no lease began since."""
    return {peer: at for peer, at in times.items() if peer in members and members[peer].heard <= at + NEWER_S}


def lost_of(members: Mapping[PeerId, MemberView]) -> frozenset[PeerId]:
    """The members to which the connection is lost."""
    return frozenset(peer for peer, view in members.items() if view.lost_at is not None)


def rounded_s(seconds: float) -> float:
    """Round to eighths of a second: the time at which a lease began must not look new at each reading."""
    return float(int(seconds * 8.0 + 0.5)) / 8.0
