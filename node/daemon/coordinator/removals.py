"""Members that the run's owner excluded: what this node does about each, and when.

An `Exclude` never changes what a certificate proves. It decides what this node folds, proposes and votes for from
its round on (rounds/, consensus/, reduction/). Once that round is final, its peer gets and gives nothing any more.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.node.daemon.consensus.exclusion import first_excluded, reason_of
from atoll.node.daemon.coordinator.interfaces import Network, RoundReducer, RunContext
from atoll.node.daemon.coordinator.runtime import FaultGuard, Machines
from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Exclude


@dataclass(slots=True, kw_only=True)
class Removals:
    """The exclusions that the ledger knows."""

    context: RunContext
    net: Network
    machines: Machines
    guard: FaultGuard
    reducer: RoundReducer
    is_synced: Callable[[], bool]
    """Returns whether this node's feed was compared with what the others have."""
    found: dict[PeerId, Exclude] = field(default_factory=dict)
    """By peer; of several about one peer the one with the lowest round."""
    _done: set[PeerId] = field(default_factory=set)
    """Peers that were cut off; this node, once it is paused."""

    @property
    def trouble(self) -> str:
        """Why this node trains no more, in one line; empty if it is not excluded."""
        own = self.found.get(self.context.me)
        return reason_of(own, self.context.me) if own else ""

    def on_exclude(self, body: Exclude) -> None:
        """Receive an exclusion from the owner's feed."""
        me = self.context.me
        if self.is_excluded(body.peer, body.round):
            return
        self.found[body.peer] = body
        self.context.log.event("excluded", round=body.round, peer=body.peer, reason=body.reason)
        if body.peer != me:  # an excluded node goes on with its own view, and only stops to train
            self.machines.feed_round(AuthorExcluded(body.peer, body.round, self.context.now()))
            self.reducer.exclude(body.peer, body.round)
        self.step()

    def step(self) -> None:
        """Pause this node, and cut off others, when their rounds have come."""
        me, deciding, at_work = self.context.me, self.machines.finality.deciding, self.machines.round.round
        for peer, body in self.found.items():
            # Until its round is final a peer may be a voter that the others need.
            is_due = max(deciding, at_work) >= body.round if peer == me else deciding > body.round
            if peer in self._done or not is_due:
                continue
            self._done.add(peer)
            if peer == me:
                self.machines.feed_round(Pause(self.trouble, self.context.now()))
            else:
                self.net.exclude(peer, reason_of(body, me))

    def is_excluded(self, peer: PeerId, number: int) -> bool:
        """Whether a peer is excluded from this round, or from one before it."""
        return peer in self.found and self.found[peer].round <= number

    def check_resume(self) -> None:
        """Raise ConfigError if this node must not train."""
        if self.context.me in self._done:
            raise ConfigError(self.trouble, hint="only a new identity can join, where the run admits it")

    def exclude(self, peer: PeerId, first: Round | None, reason: str) -> str:
        """Write that `peer` is excluded. See `NodeControl`. Returns a line for the user."""
        number = first_excluded(self.machines.finality, self.context.spec.owner, peer, first)
        if not self.is_synced():
            raise LocalFault("the node has not compared ledgers with a peer yet", hint="try again in a moment")
        if self.is_excluded(peer, number):
            return f"{peer} is excluded from round {self.found[peer].round} on already"
        if self.guard.publish(Exclude(number, peer, reason)) is None:
            raise LocalFault("the disk refused the record", hint="see `atoll status`")
        return f"{peer} is excluded from round {number} on"
