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
from atoll.protocols.ledger.registers import Lease

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
    _begun: OrderedDict[PeerId, tuple[int, int]] = field(default_factory=OrderedDict)
    """Of few: how many rounds one said to begin, and the newest of these."""

    def choose(
        self, untried: Mapping[PeerId, Lease], tried: int, near: Collection[PeerId], number: int
    ) -> set[PeerId]:
        """Those of `untried` that count as members in round `number`; `near`: neighbours.

        `untried`: with their leases. `tried`: number of members that have shown work.
        """
        if len(untried) <= max(FEW, tried):
            # Nobody waits for one that still loads: its trial has not begun.
            loading = {peer for peer, lease in untried.items() if lease.activity != "training"}
            return loading | {peer for peer in untried.keys() - loading if self._is_on_trial(peer, untried[peer])}
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

    def _is_on_trial(self, peer: PeerId, lease: Lease) -> bool:
        """Of few: one may come later, but who never works costs the others fewer and fewer rounds."""
        # Its own rounds count: nobody waits for it while the first one, at an unknown speed, takes it ten of ours.
        count, newest = self._begun.get(peer, (-1, -1))
        if lease.round != newest:
            count += 1
            put_newest(self._begun, peer, (count, lease.round), _REMEMBERED)
        trials = count // TRIAL_ROUNDS
        return trials == 0 or (trials >= AGAIN and trials & (trials - 1) == 0)
