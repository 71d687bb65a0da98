"""Newcomers of a ledger: authors without an accepted contribution. They share a budget that no flood uses up.

A made-up identity costs nothing. So an author is *new* until this node verified a payload of its, then it
*worked*, and with a contribution in a final set it is *accepted* (accepted.py). What the work is worth nobody
knows here: noise of legal size is work. New authors have a number of places, and those that worked have another.
Where all are taken, the idlest author goes of the neighbour that brought most, in the address block that brought
most: a flood takes its own places only, and a newcomer of another neighbour gets in. Once a round is final,
neighbours and blocks bring new authors at a bounded rate. While half of the places of new authors are taken the
budget is *pressed*: then nobody passes them on (p2p/swarm/replication.py).

Nothing here is agreed on between nodes: what a set or a ballot names is required, and comes back.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from atoll.p2p.ledger.accepted import Accepted
from atoll.p2p.ledger.required import Required
from atoll.p2p.ledger.shares import Need, Quota, Shares
from atoll.p2p.limits.address_block import address_block, arrival_line
from atoll.p2p.limits.bounded_table import put_newest
from atoll.p2p.limits.bringer_rates import BringerRates
from atoll.protocols.ids import Digest, PeerId, short
from atoll.protocols.ledger.records import MAX_SET, Entry

SPARE_BYTES = 32 << 20
"""A newcomer may hold more than SHARE_BYTES while all newcomers together hold less than this."""
WORKED = 1024
"""Most authors that worked and are not accepted: as many as a round's set may hold."""
COOL_S = 60.0
"""A pruned author comes back only by itself for so many seconds; so two full ledgers do not swap authors."""
_GONE = 1024
_REFUSED = 256


class NewcomerQuota(msgspec.Struct, frozen=True):
    """Limits of one node's ledger, from its NodeConfig."""

    authors: int = 256
    """Places for authors that are new; `ledger_newcomers`."""
    per_minute: int = 60
    """Most that a neighbour brings in a minute, a block twice as many; `ledger_newcomers_per_minute`."""


@dataclass(slots=True)
class _Newcomer:
    bringer: PeerId
    block: str
    active: int
    """Number of the newest event of this author; the lowest one is the idlest."""
    size_bytes: int = 0
    worked: bool = False


class Newcomers:
    """The budget of one ledger. It stores no entries: the ledger deletes those of the authors that must go."""

    def __init__(
        self,
        quota: NewcomerQuota,
        now: Callable[[], float],
        maddr_of: Callable[[PeerId], str] = lambda peer: "",
        max_accepted: int = 2816,
        shares: Shares | None = None,
    ) -> None:
        """`now`: monotonic seconds. `maddr_of`: the multiaddr of a connected peer, empty if it is not known."""
        self.quota = quota
        self.shares = shares or Shares(PeerId(""), Quota())
        self.accepted = Accepted(self.shares, max_accepted)
        self.pruned = 0
        self.is_replaying = True
        """Until the ledger was replayed nobody knows who is accepted, and all places are open to all."""
        self._now, self._maddr_of = now, maddr_of
        self._has_history = False
        self._held: dict[PeerId, _Newcomer] = {}
        self._new = 0
        self._bytes = 0
        self._events = 0
        self._gone: OrderedDict[PeerId, float] = OrderedDict()
        self._required = Required()
        self._pinned: dict[PeerId, Need] = {}
        self._refused: OrderedDict[PeerId, str] = OrderedDict()
        self._rates = BringerRates(quota.per_minute, now, self.block_of)

    # --- who is who ------------------------------------------------------------------------------

    @property
    def is_pressed(self) -> bool:
        """Whether new authors come faster than they work: half of their places are taken."""
        return not self.is_replaying and 2 * self._new >= self.quota.authors

    @property
    def counts(self) -> tuple[int, int, int]:
        """Accepted authors, those that worked, and new ones."""
        return len(self.accepted), len(self._held) - self._new, self._new

    def is_tried(self, author: PeerId) -> bool:
        """Whether the author worked; true of everybody before the first round is final."""
        return not self._has_history or self.is_held_by_work(author)

    def is_held_by_work(self, author: PeerId) -> bool:
        """Whether the author worked, or is accepted."""
        held = self._held.get(author)
        return author in self.accepted or (held is not None and held.worked)

    def is_accepted(self, author: PeerId) -> bool:
        """Whether a final set or an epoch names the author, or the RunSpec does."""
        return author in self.accepted

    def is_new(self, author: PeerId) -> bool:
        """Whether the author is in the ledger and has not shown any work."""
        return (held := self._held.get(author)) is not None and not held.worked

    def bringer(self, author: PeerId) -> PeerId | None:
        """The neighbour that brought a new author; None if it is not new."""
        return self._held[author].bringer if self.is_new(author) else None

    def line(self, author: PeerId) -> str:
        """Whose turn an author takes in sets (`arrival_line`); empty if it is no newcomer."""
        held = self._held.get(author)
        return arrival_line(author, self._maddr_of(author), brought_by=held.block) if held else ""

    def accept(self, authors: Iterable[PeerId], *, by_work: bool = True) -> None:
        """Authors of the newest final set, or (not `by_work`) of an epoch or the RunSpec: their records stay."""
        named = frozenset(authors)
        if by_work:
            self._has_history = True
            self._pinned.clear()
            self._required.clear()
            self.shares.count_round(named)
        self.accepted.add(named, by_work=by_work)
        for author in named:
            self._drop(author)

    def keep(self, authors: Iterable[PeerId]) -> None:
        """Keep these authors until more are accepted: a proposal names them."""
        self._pinned = dict.fromkeys(authors, Need.NAMED) | self._pinned

    def vouch(self, author: PeerId) -> bool:
        """A payload of this author was verified here. Whether that is news."""
        if (held := self._held.get(author)) is None or held.worked:
            return False
        held.worked, held.active = True, self._tick()
        self._new -= 1
        return True

    def require(self, entries: Iterable[Digest], proposer: PeerId | None) -> None:
        """A set or a ballot names these entries: their authors are taken whatever the budget says.

        `proposer`: who proposed it; None: a quorum voted for it.
        """
        self._required.add(entries, proposer)

    # --- places ----------------------------------------------------------------------------------

    def reset(self, sizes: Mapping[PeerId, int]) -> None:
        """Know exactly these authors, with the bytes that each holds: after the ledger was opened, or failed."""
        self.shares.reset(sizes)
        for author in self._held.keys() - sizes.keys():
            self._drop(author)
        for author in {author for author in sizes.keys() - self._held.keys() if not self._is_old(author)}:
            self._add(author, author, author, sizes[author])

    def end_replay(self) -> list[PeerId]:
        """The replay told who is accepted. Returns the authors that must go, because there are too many."""
        self.is_replaying = False
        return [*self._surplus(worked=False), *self._surplus(worked=True)]

    def note_named(self, entry: Digest, author: PeerId) -> None:
        """An entry came. If it is required, its author is pinned."""
        if need := self._required.take(entry):
            self._pinned[author] = max(need, self._pinned.get(author, need))

    def absent(self, here: Container[PeerId]) -> list[PeerId]:
        """Authors that a set or a ballot names and whose feeds are not here, or rest: they may rest elsewhere."""
        away = (a for a in self._pinned if a not in here or a in self.accepted.resting)
        # As many as one set names, those first that a quorum decided: a liar may name any number.
        return heapq.nlargest(MAX_SET, away, key=self._pinned.__getitem__)

    @property
    def awaits_entries(self) -> bool:
        """Whether `note_named` is worth a call."""
        return self._required.need > Need.NONE

    def reason(self, author: PeerId) -> str:
        """Why no more is stored of an author; empty if it is, or it is not here and not known to have tried."""
        if author in self.accepted or author in self._held:
            return self.shares.reason(author) if self.is_full(author) else ""
        return f"{short(author)} {_LOST}" if author in self._gone else self._refused.get(author, "")

    def is_refused(self, entry: Entry, sender: PeerId | None) -> bool:
        """Whether this entry, of an author without a feed here, is refused. Counts against the sender's rate."""
        author = entry.author
        if author in self.accepted or author in self._held or author in self._pinned or sender is None:
            return False
        if entry.seq and author not in self.accepted.resting:
            return self.is_pressed  # an exchange would bring the feed from its start: not while many wait
        reason = self._refusal(author, sender)
        if reason and sender == author:
            put_newest(self._refused, author, reason, _REFUSED)
        return bool(reason)

    def _refusal(self, author: PeerId, sender: PeerId) -> str:
        if self.is_full(author):
            return self.shares.reason(author)
        if self.is_replaying or not (self._has_history or self.is_pressed):
            return ""
        gone_s = self._now() - self._gone.get(author, -COOL_S)
        if gone_s < COOL_S and sender != author:
            return f"{short(author)} {_LOST}"
        if where := self._rates.take(author, sender):
            return f"too many new authors from {where} (ledger_newcomers_per_minute); {_ADVICE}"
        return ""

    def is_spent(self, sender: PeerId) -> bool:
        """Whether a neighbour brings no other new author for now, so that it need not send any."""
        return self._has_history and not self.is_replaying and self._rates.is_spent(sender)

    def take_place(self, author: PeerId, sender: PeerId | None) -> list[PeerId]:
        """Give a new author its place; return the authors that must go for it."""
        if author in self.accepted or author in self._held:
            return []
        self.accepted.wake(author)
        bringer = sender or author
        self._add(author, bringer, self.block_of(bringer), 0)
        return self._surplus(worked=False)

    def is_full(self, author: PeerId) -> bool:
        """Whether no more of an author is stored."""
        need = max(self._required.need, self._pinned.get(author, Need.NONE))
        if self._is_old(author):
            return self.shares.is_full(author, need)
        return self.shares.is_full_for_new(author, need, has_spare=self._bytes < SPARE_BYTES)

    def grow(self, author: PeerId, size_bytes: int) -> None:
        """An entry of so many bytes was stored."""
        self.shares.grow(author, size_bytes)
        if (held := self._held.get(author)) is not None:
            held.size_bytes += size_bytes
            self._bytes += size_bytes
            held.active = self._tick()

    def _surplus(self, *, worked: bool) -> list[PeerId]:
        places = WORKED if worked else self.quota.authors
        if self.is_replaying and not worked:
            places = max(places, self.accepted.most - len(self.accepted))
        group = {a: held for a, held in self._held.items() if held.worked == worked and a not in self._pinned}
        gone: list[PeerId] = []
        while len(group) > places:
            victim = _victim(group)
            del group[victim]
            self._drop(victim)
            if self.accepted.lose(victim):
                continue
            self.shares.forget(victim)
            put_newest(self._gone, victim, self._now(), _GONE)
            self.pruned += 1
            gone.append(victim)
        return gone

    def _is_old(self, author: PeerId) -> bool:
        return author in self.accepted or author in self.accepted.resting or author in self.accepted.woken

    def _add(self, author: PeerId, bringer: PeerId, block: str, size_bytes: int) -> None:
        self._refused.pop(author, None)
        self._gone.pop(author, None)
        self._held[author] = _Newcomer(bringer, block, self._tick(), size_bytes)
        self._new += 1
        self._bytes += size_bytes

    def _drop(self, author: PeerId) -> None:
        if (held := self._held.pop(author, None)) is not None:
            self._bytes -= held.size_bytes
            self._new -= not held.worked

    def _tick(self) -> int:
        self._events += 1
        return self._events

    def block_of(self, peer: PeerId) -> str:
        """Address block of a connected peer; the peer itself if no IP address of its is known."""
        return address_block(self._maddr_of(peer)) or peer


_ADVICE = "stay connected: it is tried again, and who contributes is kept"
_LOST = f"has shown no work yet and lost its place to others (ledger_newcomers); {_ADVICE}"


def _victim(group: Mapping[PeerId, _Newcomer]) -> PeerId:
    """The idlest author of the neighbours that brought most, in the blocks that brought most."""
    blocks = Counter(held.block for held in group.values())
    share = max(blocks.values())
    heavy = [(author, held) for author, held in group.items() if blocks[held.block] == share]
    bringers = Counter(held.bringer for _, held in heavy)
    most = max(bringers.values())
    return min((held.active, author) for author, held in heavy if bringers[held.bringer] == most)[1]
