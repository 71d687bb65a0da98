"""Which members without any work are waited for when there are many: a few connected ones, each for a while.

A lease costs nothing, so waiting for each would stop the rounds. Waiting for none would shut out newcomers: one
that begins in the middle of a round is late in that round and in each one after it.
"""

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Activity

FEW = 4
"""So many members without work are waited for at a time; all, if they are no more than those with work."""
TRIAL_ROUNDS = 3
"""Rounds for which one is waited for. A verified payload, late or not, ends the trial: then it is a member."""
AGAIN = 4
"""Of few members one has another trial after so many times these rounds, and after twice as many each time."""
_REMEMBERED = 4096


@dataclass(slots=True)
class Trials:
    """The members on trial, and those that had theirs."""

    block_of: Callable[[PeerId], str]
    """Address block of a connected peer."""
    rng: random.Random = field(default_factory=random.Random)
    _since: OrderedDict[PeerId, int] = field(default_factory=OrderedDict)
    """Round in which a trial began, by peer."""

    def choose(
        self, untried: Mapping[PeerId, Activity], tried: int, near: Collection[PeerId], number: int
    ) -> set[PeerId]:
        """Those of `untried` that count as members in round `number`; `near`: neighbours.

        `untried`: what their leases say. `tried`: number of members that have shown work.
        """
        if len(untried) <= max(FEW, tried):
            # The trial of one that still loads has not begun; no round waits for it.
            working = {peer for peer, activity in untried.items() if activity == "training"}
            for peer in working - self._since.keys():
                put_newest(self._since, peer, number, _REMEMBERED)
            return {peer for peer in untried if peer not in working or self._is_on_trial(peer, number)}
        able = [peer for peer in untried if peer in near]
        chosen = {peer for peer in able if number < self._since.get(peer, -TRIAL_ROUNDS) + TRIAL_ROUNDS}
        waiting = [peer for peer in able if peer not in self._since]
        while waiting and len(chosen) < FEW:
            # A block after the other: many identities of one block do not keep those of another waiting.
            taken = Counter(self.block_of(peer) for peer in chosen)
            fewest = min(taken[self.block_of(peer)] for peer in waiting)
            peer = self.rng.choice([peer for peer in waiting if taken[self.block_of(peer)] == fewest])
            waiting.remove(peer)
            chosen.add(peer)
            put_newest(self._since, peer, number, _REMEMBERED)
        return chosen

    def _is_on_trial(self, peer: PeerId, number: int) -> bool:
        """Of few: a slow one may come later, but one that never works costs the others fewer and fewer rounds."""
        trials = (number - self._since[peer]) // TRIAL_ROUNDS
        return trials <= 0 or (trials >= AGAIN and trials & (trials - 1) == 0)
