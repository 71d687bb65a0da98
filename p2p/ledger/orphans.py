"""Entries of equivocators that no feed here can hold: kept apart, and fetched by name over `ledger.orphans`.

After an author signed two histories, nodes hold different ones, and a feed takes no entry of the other. What a
final set names, or what made it final, may stand there. So a node asks its neighbours for single entries, and
keeps those that it asked for. It never passes them on by itself.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.p2p.ledger.sync import LedgerSync
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
        self.ledger = self.sync.ledger
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
        named = [self.ledger.get(name) or self.ledger.orphan(name) for name in wanted.entries]
        found = [entry for entry in named if entry is not None and entry.body.round == wanted.round]
        if None in named:
            found += self._covered(wanted)
            found += [entry for entry in self.ledger.newest_epochs(EPOCHS_MAX) if _signs(entry, wanted.entries)]
        if wanted.proposals:
            votes = self.ledger.entries(kind=Vote, number=wanted.round) + self.ledger.orphans(wanted.round)
            for proposal in wanted.proposals:
                found += [vote for vote in votes if _is_for(vote, (proposal,))]
        return FoundEntries(_fitting(found))

    def _covered(self, wanted: WantedEntries) -> list[Entry]:
        """Contributions of equivocators to a round, if the `members` of one of its Reductions are wanted."""
        ledger, number = self.ledger, wanted.round
        apart = ledger.orphans(number)
        here = [*ledger.entries(kind=Reduction, number=number), *apart]
        if not any(isinstance(one.body, Reduction) and one.body.members in wanted.entries for one in here):
            return []
        apart += [one for author in ledger.equivocators() for one in ledger.entries(number=number, author=author)]
        return [entry for entry in apart if _is_work(entry, wanted)]


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
