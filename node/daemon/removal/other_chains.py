"""Contributions that were made in another chain: own sets of open rounds leave them out (docs/epochs.md).

An author works in the epoch that it signed or followed last before the contribution in its feed. What it made
before that, in rounds that this epoch decides, was trained apart, too. Nodes that have the same entries and the
same chain leave out the same work.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from atoll.node.daemon.consensus.chains.apart import parting
from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochBook, EpochId
from atoll.node.daemon.consensus.types import FinalityState, OtherChainsSeen
from atoll.node.daemon.rounds.types import WorkApart
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Contribution, Entry, Epoch, Follow, epoch_id

CHOICES_KEPT = 64
"""Newest choices of an author that are looked at. An honest one makes few while a round is open; strangers write
hundreds each, and all are looked at after each new epoch."""


class _Machines(Protocol):
    finality: FinalityState

    def feed_finality(self, event: OtherChainsSeen) -> None: ...

    def feed_round(self, event: WorkApart) -> None: ...


class _Work(NamedTuple):
    author: PeerId
    choices: int
    """How many choices its author had made before it."""
    base: Digest
    """Digest of the weights that it was trained from."""


@dataclass(slots=True)
class OtherChains:
    """In which chain each contribution to an open round was made; tells both machines which are apart."""

    machines: _Machines
    now: Callable[[], float]
    _choices: dict[PeerId, dict[int, EpochId]] = field(default_factory=dict)
    """The newest epochs that an author signed or followed, by their number in its feed, from 1 on."""
    _works: dict[int, dict[Digest, _Work]] = field(default_factory=dict)
    """By round and entry."""
    _partings: dict[EpochId, Epoch | None] = field(default_factory=dict)
    """What `parting` said of each choice, as of the last look."""
    _looked_at: tuple[EpochBook, object] | None = None
    _gone: set[PeerId] = field(default_factory=set)
    """Authors that the ledger let go of, of whose work the finality machine kept some."""

    def on_entry(self, entry: Entry) -> None:
        """Note an entry. Those of one feed come in order."""
        self._gone.discard(entry.author)
        match entry.body:
            case Epoch(members=members) as body if entry.author in members:
                self._note_choice(entry.author, epoch_id(body))
            case Follow(epoch=name):
                self._note_choice(entry.author, name)
            case Contribution(round=number, base=base) if number > self.machines.finality.last_final:
                at, choice = next(reversed(self._choices.get(entry.author, {}).items()), (0, ROOT))
                self._works.setdefault(int(number), {})[entry.id] = _Work(entry.author, at, base)
                # Before it gets into an own set. A whole look at each takes the square of what strangers write.
                if at and parting(self.machines.finality, choice) is not None:
                    self._looked_at = None
                    self._tell(self.machines.finality.apart | {entry.id})

    def _note_choice(self, author: PeerId, name: EpochId) -> None:
        chosen = self._choices.setdefault(author, {})
        chosen[next(reversed(chosen), 0) + 1] = name
        if len(chosen) > CHOICES_KEPT:
            del chosen[next(iter(chosen))]

    def forget(self, author: PeerId) -> None:
        """Forget an author that the ledger let go of, after the finality machine did."""
        books = self.machines.finality.books
        for number, works in self._works.items():
            kept = books[number].contributions if number in books else ()
            for entry in [name for name, work in works.items() if work.author == author and name not in kept]:
                del works[entry]
        # What the machine kept, because its payload is here, was made in the same chain as before.
        self._gone.add(author)
        self._forget_choices()
        self._looked_at = None

    def _forget_choices(self) -> None:
        here = {work.author for works in self._works.values() for work in works.values()} if self._gone else set()
        for author in self._gone - here:
            self._choices.pop(author, None)
        self._gone &= here

    def step(self) -> None:
        """Tell the machines, if that changed."""
        state = self.machines.finality
        if not self._works or self._is_as_before(state):
            return
        for number in [at for at in self._works if at <= state.last_final]:
            del self._works[number]
        self._forget_choices()
        found = frozenset(self._found(state) if self._choices else ())
        if found != state.apart:
            self._tell(found)

    def _tell(self, found: frozenset[Digest]) -> None:
        self.machines.feed_finality(OtherChainsSeen(found))
        self.machines.feed_round(WorkApart(found, self.now()))

    def _is_as_before(self, state: FinalityState) -> bool:
        """Whether nothing changed on which the answer depends. Votes in rounds do not count."""
        before, book, place = self._looked_at, state.epochs.unvoted, (state.chain, state.deciding)
        self._looked_at = book, place
        return before is not None and before[0] is book and before[1] == place

    def _found(self, state: FinalityState) -> Iterator[Digest]:
        authors = {work.author for works in self._works.values() for work in works.values()}
        chosen = {author: self._choices.get(author, {}).values() for author in authors}
        self._partings = {choice: parting(state, choice) for each in chosen.values() for choice in each}
        others = {who for who, each in chosen.items() if any(self._partings[choice] for choice in each)}
        together = self._together(others)
        for number, works in self._works.items():
            for entry, work in works.items():
                if work.author in others and self._is_apart(work, number, together.get(work[:2], -1)):
                    yield entry

    def _together(self, others: Collection[PeerId]) -> dict[tuple[PeerId, int], int]:
        """Newest round that an author trained from the same weights as one that never was in another chain.

        By author and the number of its choices until then: it may be together with these again.
        """
        newest = dict[tuple[PeerId, int], int]()
        for number, works in sorted(self._works.items()):
            bases = {work.base for work in works.values() if work.author not in others}
            newest.update((work[:2], number) for work in works.values() if work.base in bases)
        return newest

    def _is_apart(self, work: _Work, number: int, together: int) -> bool:
        """Whether its author was in another chain, or next began one that goes on from where it was."""
        chosen, book = self._choices.get(work.author, {}), self.machines.finality.epochs
        before, later = chosen.get(work.choices, ROOT), (name for at, name in chosen.items() if at > work.choices)
        if self._partings.get(before) is not None:
            return True
        if number <= together:
            return False
        left_by = self._partings.get(next(filter(book.is_complete, later), ROOT))
        return left_by is not None and left_by.parent == book.begun(before) and number >= left_by.round
