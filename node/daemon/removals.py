"""Members that the run's owner or two thirds of its voters excluded: what this node does about each, and when.

An `Exclude` never changes what a certificate proves. It decides what this node folds, proposes and votes for from
its round on (rounds/, consensus/, reduction/). Once that round is final, its peer gets and gives nothing any more.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.node.daemon.consensus.epochs import MAX_VOTES
from atoll.node.daemon.consensus.exclusion import needed_votes, works_with_us
from atoll.node.daemon.consensus.types import FinalityState
from atoll.node.daemon.coordinator.interfaces import Network, RoundReducer, RunContext
from atoll.node.daemon.coordinator.runtime import FaultGuard, Machines
from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.protocols.errors import ConfigError, LocalFault
from atoll.protocols.ids import PeerId, Round, short
from atoll.protocols.ledger.records import Exclude
from atoll.protocols.local.standing import Exclusion, VotesAgainst

SHOWN = 64
"""Most members that are shown with the votes against them."""


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
    found: dict[PeerId, Exclusion] = field(default_factory=dict)
    """By peer; of several about one peer the one with the lowest round."""
    _reasons: dict[tuple[PeerId, PeerId], str] = field(default_factory=dict)
    """By member and author: the reason that the author of a vote gave. Only of votes that count."""
    _done: set[PeerId] = field(default_factory=set)
    """Peers that were cut off; this node, once it is paused."""

    @property
    def trouble(self) -> str:
        """Why this node trains no more, in one line; empty if it is not excluded."""
        own = self.found.get(self.context.me)
        return reason_of(own, self.context.me) if own else ""

    def on_exclude(self, author: PeerId, body: Exclude) -> None:
        """Receive the owner's exclusion, or a member's vote, once the finality machine has it."""
        if author == self.context.spec.owner:
            self._add(body.peer, body.round, body.reason, by="owner")
        elif body.reason:
            cast = self.machines.finality.epochs.votes_against
            known = {**self._reasons, (body.peer, author): body.reason}
            # An author has few votes that count, and none once its feed was pruned.
            self._reasons = {key: text for key, text in known.items() if key[0] in cast.get(key[1], ())}
        self.step()

    def _reason(self, peer: PeerId, first: int) -> str:
        """What one of the voters that excluded a member gave as its reason: the same one on all nodes."""
        state = self.machines.finality
        is_known = first == state.deciding or first in state.decided
        voters = state.electorate(first).voters if is_known else ()
        return next((text for (of, by), text in sorted(self._reasons.items()) if of == peer and by in voters), "")

    def _add(self, peer: PeerId, number: Round, reason: str, *, by: str) -> None:
        if self.is_excluded(peer, number):
            return
        self.found[peer] = Exclusion(peer=peer, round=number, reason=reason, by=by)
        self.context.log.event("excluded", round=number, peer=peer, reason=reason)
        if peer != self.context.me:  # an excluded node goes on with its own view, and only stops to train
            self.machines.feed_round(AuthorExcluded(peer, number, self.context.now()))
            self.reducer.exclude(peer, number)

    def step(self) -> None:
        """Read what votes decided; pause this node, and cut off others, when their rounds have come."""
        me, finality, at_work = self.context.me, self.machines.finality, self.machines.round.round
        for peer, first in finality.epochs.voted_out.items():
            if not self.is_excluded(peer, first):
                self._add(peer, Round(first), self._reason(peer, first), by="voters")
        for peer, one in self.found.items():
            # Until its round is final a peer may be a voter that the others need.
            is_due = max(finality.deciding, at_work) >= one.round if peer == me else finality.deciding > one.round
            if peer in self._done or not is_due:
                continue
            if peer == me:
                self.machines.feed_round(Pause(self.trouble, self.context.now()))
            elif one.by == "owner" or works_with_us(finality, peer):
                self.net.exclude(peer, reason_of(one, me))
            else:
                continue
            self._done.add(peer)

    def is_excluded(self, peer: PeerId, number: int) -> bool:
        """Whether a peer is excluded from this round, or from one before it."""
        return peer in self.found and self.found[peer].round <= number

    def check_resume(self) -> None:
        """Raise ConfigError if this node must not train."""
        if self.context.me in self._done:
            raise ConfigError(self.trouble, hint="only a new identity can join, where the run admits it")

    def exclude(self, peer: PeerId, first: Round | None, reason: str) -> str:
        """Write that `peer` is excluded, or vote for it. See `NodeControl`. Returns a line for the user."""
        number = first_excluded(self.machines.finality, peer, first)
        if not self.is_synced():
            raise LocalFault("the node has not compared ledgers with a peer yet", hint="try again in a moment")
        if self.is_excluded(peer, number):
            return f"{peer} is excluded from round {self.found[peer].round} on already"
        cast = self.machines.finality.epochs.votes_against.get(self.context.me, {})
        is_new = cast.get(peer, number + 1) > number
        if is_new and self.guard.publish(Exclude(number, peer, reason)) is None:
            raise LocalFault("the disk refused the record", hint="see `atoll status`")
        if self.context.me != self.context.spec.owner:
            return vote_line(self.machines.finality, peer)
        return f"{peer} is excluded from round {number} on"


# --- what people read, and what they may write; pure ------------------------------------------------


def reason_of(one: Exclusion, me: PeerId) -> str:
    """One line on an exclusion, for the node `me` or for its peer."""
    who, why = "this node" if one.peer == me else short(one.peer), f": {one.reason}" if one.reason else ""
    by = "the run's owner" if one.by == "owner" else "two thirds of the voters"
    return f"{by} excluded {who} from round {one.round} on{why}"


def votes_against(state: FinalityState) -> tuple[VotesAgainst, ...]:
    """The members that some voters of the round that is decided next, or this node, want to exclude."""
    cast, gone = state.epochs.votes_against, state.epochs.excluded_from(state.deciding)
    votes = Counter(
        peer for voter in state.voters for peer, first in cast.get(voter, {}).items() if first <= state.deciding
    )
    own, needed = cast.get(state.me, {}), needed_votes(state)
    shown = sorted({*votes, *own} - gone, key=lambda peer: (peer not in own, -votes[peer], peer))[:SHOWN]
    return tuple(VotesAgainst(peer=peer, votes=votes[peer], needed=needed, by_us=peer in own) for peer in shown)


def vote_line(state: FinalityState, peer: PeerId) -> str:
    """What the vote of this node against `peer` amounts to, in one line."""
    cast = state.epochs.votes_against
    # The vote may still be on its way to this machine.
    votes = sum(voter == state.me or peer in cast.get(voter, ()) for voter in state.voters)
    needed = needed_votes(state)
    said = f"this node voted to exclude {peer}: {votes} of the {needed} votes that exclude it"
    return said if state.me in state.voters else f"{said}; this node is no voter now, its vote counts once it is"


def first_excluded(state: FinalityState, peer: PeerId, first: Round | None) -> Round:
    """The round from which this node may exclude `peer`; `first`: the user's wish. Raises ConfigError."""
    if peer == state.me:
        raise ConfigError("a node cannot exclude itself", hint="stop it instead: atoll stop")
    if peer == state.epochs.owner:
        raise ConfigError("the run's owner cannot be excluded", hint="docs/removal.md says why")
    # What voters signed cannot be signed again, and no node keeps the payloads of all rounds to fold them anew.
    if first is not None and not state.deciding <= first < state.rounds:
        raise ConfigError(
            f"round {first} is final, or not of this run; final rounds keep the member's work",
            hint=f"exclude from round {state.deciding} on; docs/removal.md says how a run begins again without it",
        )
    cast = state.epochs.votes_against.get(state.me, {})
    if len(cast) >= MAX_VOTES and peer not in cast:
        raise ConfigError(
            f"this node voted to exclude {MAX_VOTES} members", hint="no more of its votes count; others may vote"
        )
    return state.deciding if first is None else first
