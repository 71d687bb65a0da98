"""Contributions that were made in another chain: own sets of open rounds leave them out (docs/epochs.md).

An author works in the epoch that it signed or followed last before the contribution in its feed. So all nodes
that have the same entries and the same chain leave out the same work.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atoll.node.daemon.consensus.apart import is_apart
from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochBook, EpochId
from atoll.node.daemon.consensus.types import FinalityState, OtherChainsSeen
from atoll.node.daemon.rounds.types import WorkApart
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Contribution, Entry, Epoch, Follow, epoch_id


class _Machines(Protocol):
    finality: FinalityState

    def feed_finality(self, event: OtherChainsSeen) -> None: ...

    def feed_round(self, event: WorkApart) -> None: ...


@dataclass(slots=True)
class OtherChains:
    """The epoch in which each contribution to an open round was made; tells both machines which are apart."""

    machines: _Machines
    now: Callable[[], float]
    _choices: dict[PeerId, EpochId] = field(default_factory=dict)
    """The epoch that an author signed or followed last."""
    _made_in: dict[int, dict[Digest, EpochId]] = field(default_factory=dict)
    """By round and entry; without those that were made in the run's first epoch."""
    _is_other: dict[EpochId, bool] = field(default_factory=dict)
    """Of the epochs in `_made_in`, as of the last look."""
    _looked_at: tuple[EpochBook, object] | None = None

    def on_entry(self, entry: Entry) -> None:
        """Note an entry. Those of one feed come in order."""
        match entry.body:
            case Epoch(members=members) as body if entry.author in members:
                self._choices[entry.author] = epoch_id(body)
            case Follow(epoch=name):
                self._choices[entry.author] = name
            case Contribution(round=number) if self._choices.get(entry.author, ROOT) != ROOT:
                choice = self._choices[entry.author]
                self._made_in.setdefault(int(number), {})[entry.id] = choice
                if self._is_other.get(choice, True):
                    self._looked_at = None
                    self.step()  # before it gets into an own set

    def step(self) -> None:
        """Tell the machines, if that changed."""
        state = self.machines.finality
        if not self._made_in or self._is_as_before(state):
            return
        for number in [at for at in self._made_in if at <= state.last_final]:
            del self._made_in[number]
        choices = {choice for made in self._made_in.values() for choice in made.values()}
        self._is_other = {choice: is_apart(state, choice) for choice in choices}
        found = frozenset(
            entry for made in self._made_in.values() for entry, choice in made.items() if self._is_other[choice]
        )
        if found != state.apart:
            self.machines.feed_finality(OtherChainsSeen(found))
            self.machines.feed_round(WorkApart(found, self.now()))

    def _is_as_before(self, state: FinalityState) -> bool:
        """Whether nothing changed on which the answer depends. Votes in rounds do not count."""
        before, book, place = self._looked_at, state.epochs.unvoted, (state.chain, state.deciding)
        self._looked_at = book, place
        return before is not None and before[0] is book and before[1] == place
