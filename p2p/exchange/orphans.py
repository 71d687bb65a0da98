"""Entries of equivocators that no feed here can hold: kept apart, and fetched by name over `ledger.orphans`.

After an author signed two histories, nodes hold different ones, and a feed takes no entry of the other. What a
final set names, or what made it final, may stand there. So a node asks its neighbours for single entries, and
keeps those that it asked for. It never passes them on by itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.exchange.sync import LedgerSync
from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId, RecordRound
from atoll.protocols.ledger.records import (
    ENTRY_MAX_BYTES,
    Contribution,
    Entry,
    Epoch,
    Reduction,
    Vote,
    encode_entry,
    epoch_id,
)

METHOD = "ledger.orphans"
MAX_NAMES = 256
ANSWER_BYTES = 256 * 1024
MESSAGE_BYTES = ANSWER_BYTES + ENTRY_MAX_BYTES
"""Largest message, in bytes: the last entry may begin below ANSWER_BYTES."""
EPOCHS_MAX = 4096
"""Newest signatures under epochs that are looked through for who asks: anybody may have signed any number."""
_MAX_ENTRIES = 2048
_SLICE = 64
"""Entries that are read before other tasks run: half a millisecond."""
_ROUNDS = 8
"""Indexes of rounds in memory: neighbours ask about few rounds at a time."""
Names: TypeAlias = Annotated[tuple[Digest, ...], Meta(max_length=MAX_NAMES)]


class WantedEntries(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one node lacks of one round."""

    round: RecordRound
    entries: Names = ()
    """Ids of contributions, Reductions and proposals; of epochs, whose signatures of any round are wanted; and
    `members` of Reductions, whose work of equivocators is wanted: a Reduction does not name it."""
    proposals: Names = ()
    """Ids of proposals whose votes are wanted, the most important first: an answer may end before the rest."""


class FoundEntries(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Those that the other side has, each as on the wire of entries."""

    entries: Annotated[tuple[bytes, ...], Meta(max_length=_MAX_ENTRIES)]


Read: TypeAlias = Callable[[int, int], list[tuple[int, Entry]]]
"""Entries that arrived after a cursor, and at most so many."""


class NameIndex:
    """Which entries name a proposal, an epoch or members: each entry is read once, and an answer reads no others.

    Entries may go from the ledger: the index then still has their cursors, until it begins anew at twice its size.
    """

    def __init__(self, read: Read, begin: Callable[[], int] = lambda: 0) -> None:
        """`begin`: the cursor to begin after."""
        self._read = read
        self._begin = begin
        self._size, self._most = 0, -1

    async def find(self, names: Iterable[Digest]) -> list[int]:
        """Cursors of the entries that name these: in the order of the names, then of arrival."""
        await self._update()
        return [cursor for name in names for cursor in self._named.get(name, ())]

    async def _update(self) -> None:
        is_new = self._size > self._most
        if is_new:
            self._named: dict[Digest, list[int]] = {}
            self._cursor, self._size = self._begin(), 0
        while rows := self._read(self._cursor, _SLICE):
            for cursor, entry in rows:
                if (name := _name_in(entry)) is not None:
                    self._named.setdefault(name, []).append(cursor)
            self._cursor, self._size = rows[-1][0], self._size + len(rows)
            await asyncio.sleep(0)
        if is_new:
            self._most = 2 * self._size + EPOCHS_MAX


@dataclass(eq=False)
class OrphanExchange:
    """Asks for what `wanted` names, and answers others."""

    sync: LedgerSync
    on_found: Callable[[tuple[Entry, ...]], None] = lambda entries: None
    """Receives entries that were new; they are on disk."""
    wanted: dict[int, WantedEntries] = field(default_factory=dict, init=False)
    """What is asked for in every exchange, by round."""
    covered: dict[int, WantedEntries] = field(default_factory=dict, init=False)
    """What Reductions of a round cover: asked for once, by round."""

    def __post_init__(self) -> None:
        self.ledger = ledger = self.sync.ledger
        self._epochs = NameIndex(ledger.reader.epochs_after, lambda: ledger.reader.newest_epochs_from(EPOCHS_MAX))
        self._orphans = NameIndex(ledger.reader.orphans_after)
        self._rounds: OrderedDict[tuple[type[Any], int], NameIndex] = OrderedDict()
        self.sync.calls.register(METHOD, WantedEntries, FoundEntries, self._answer, max_bytes=MESSAGE_BYTES)

    def want(self, wanted: WantedEntries, *, covered: bool = False) -> None:
        """Ask for these from now on, instead of others of their round; none: for nothing of it.

        `covered`: they are `members` of Reductions. These are asked for beside the others, in one exchange.
        """
        table = self.covered if covered else self.wanted
        table.pop(wanted.round, None)
        # A reduced set may lack more than one message names; they are named again as others come.
        wanted = WantedEntries(wanted.round, wanted.entries[:MAX_NAMES], wanted.proposals[:MAX_NAMES])
        # Where nobody has two histories, feeds bring all that is covered.
        if (wanted.entries or wanted.proposals) and not (covered and not self.ledger.equivocators()):
            table[wanted.round] = wanted

    def clear(self) -> None:
        """Ask for nothing."""
        self.wanted.clear()
        self.covered.clear()

    async def fetch(self, peer: PeerId) -> int:
        """Ask `peer` for what is wanted; return how much was new. The caller owns the deadline.

        Raises Unreachable, PeerFault, RunMismatch, DiskFault.
        """
        covered, self.covered = self.covered, {}
        asked = [(each, _was_asked_for) for each in self.wanted.values()]
        asked += [(each, _is_work) for each in covered.values()]
        return sum([await self._fetch(peer, *each) for each in asked])

    async def _fetch(
        self, peer: PeerId, wanted: WantedEntries, was_asked_for: Callable[[Entry, WantedEntries], bool]
    ) -> int:
        answer = await self.sync.calls.call(peer, METHOD, wanted, FoundEntries, max_bytes=MESSAGE_BYTES)
        self.sync.on_answer(peer, sum(map(len, answer.entries)))
        entries = await self.sync.verified(answer.entries)
        if not all(was_asked_for(entry, wanted) for entry in entries):
            raise DecodeError("entries that nobody asked for")
        # Of an author without a proof an entry belongs into its feed, unless it is the proof.
        forked = self.ledger.equivocators()
        self.sync.insert(peer, [entry for entry in entries if entry.author not in forked])
        fresh = self.ledger.add_orphans(entries)
        if fresh:
            self.on_found(fresh)
        return len(fresh)

    async def _answer(self, peer: PeerId, wanted: WantedEntries) -> FoundEntries:
        ledger, names = self.ledger, tuple(dict.fromkeys(wanted.entries))
        named = [ledger.get(name) or ledger.orphan(name) for name in names]
        found = [entry for entry in named if entry is not None and entry.body.round == wanted.round]
        if None in named:
            found += await self._covered(wanted, names)
            found += [
                one for one in ledger.reader.arrived((await self._epochs.find(names))[::-1]) if _signs(one, names)
            ]
            apart = ledger.reader.arrived(await self._orphans.find(names), are_orphans=True)
            found += [one for one in apart if _signs(one, names)]
        return FoundEntries(_fitting(chain(found, await self._votes(wanted) if wanted.proposals else ())))

    async def _votes(self, wanted: WantedEntries) -> Iterator[Entry]:
        """Votes for the wanted proposals, one by one: an answer may end before the last."""
        proposals = tuple(dict.fromkeys(wanted.proposals))
        here = await self._of_round(Vote, wanted.round).find(proposals)
        apart = self.ledger.reader.arrived(await self._orphans.find(proposals), are_orphans=True)
        others = (vote for vote in apart if vote.body.round == wanted.round and _is_for(vote, proposals))
        return chain(self.ledger.reader.arrived(here), others)

    async def _covered(self, wanted: WantedEntries, names: Collection[Digest]) -> list[Entry]:
        """Contributions of equivocators to a round, if the `members` of one of its Reductions are wanted."""
        ledger, number = self.ledger, wanted.round
        apart = ledger.reader.arrived(await self._orphans.find(names), are_orphans=True)
        here = await self._of_round(Reduction, number).find(names)
        if not here and not any(isinstance(e.body, Reduction) and e.body.round == number for e in apart):
            return []
        found = [entry for entry in ledger.orphans(number) if _is_work(entry, wanted)]
        for author in sorted(ledger.equivocators()):
            found += [one for one in ledger.entries(number=number, author=author) if _is_work(one, wanted)]
            await asyncio.sleep(0)
        return found

    def _of_round(self, kind: type[Any], number: int) -> NameIndex:
        def read(cursor: int, limit: int) -> list[tuple[int, Entry]]:
            return self.ledger.reader.round_after(kind, number, cursor, limit)

        index = self._rounds.get((kind, number)) or NameIndex(read)
        put_newest(self._rounds, (kind, number), index, _ROUNDS)
        return index


def _name_in(entry: Entry) -> Digest | None:
    """What others ask for this entry by, beside its id."""
    match entry.body:
        case Vote(proposal=name) | Reduction(members=name):
            return name
        case Epoch():
            return epoch_id(entry.body)
    return None


def _is_work(entry: Entry, wanted: WantedEntries) -> bool:
    return entry.body.round == wanted.round and isinstance(entry.body, Contribution)


def _was_asked_for(entry: Entry, wanted: WantedEntries) -> bool:
    is_named = entry.id in wanted.entries or _is_for(entry, wanted.proposals)
    return (entry.body.round == wanted.round and is_named) or _signs(entry, wanted.entries)


def _signs(entry: Entry, names: Collection[Digest]) -> bool:
    return isinstance(entry.body, Epoch) and epoch_id(entry.body) in names


def _is_for(entry: Entry, proposals: Collection[Digest]) -> bool:
    return isinstance(entry.body, Vote) and entry.body.proposal in proposals


def _fitting(entries: Iterable[Entry]) -> tuple[bytes, ...]:
    """The first of these entries that fit into an answer."""
    found: list[bytes] = []
    size = 0
    for entry in entries:
        data = encode_entry(entry)
        size += len(data)
        if found and (size > ANSWER_BYTES or len(found) == _MAX_ENTRIES):
            break
        found.append(data)
    return tuple(found)
