"""Members that the run's owner or two thirds of its voters excluded: what this node does about each, and when.

An `Exclude` never changes what a certificate proves. It decides what this node folds, proposes and votes for from
its round on (rounds/, consensus/, reduction/). Once that round is final, its peer gets and gives nothing any more.
An `Excise` also wants the peer's work taken out of final rounds: consensus/excision.py.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from atoll.node.daemon.consensus.excision import corrections, due, wanted
from atoll.node.daemon.consensus.types import Correction, CorrectionsHeld
from atoll.node.daemon.core.interfaces import Network, RoundReducer, RunContext
from atoll.node.daemon.core.runtime import FaultGuard, Machines
from atoll.node.daemon.removal.other_chains import OtherChains
from atoll.node.daemon.removal.reasons import reason_given
from atoll.node.daemon.removal.requests import first_excised, first_excluded, reason_of, since_of, vote_line
from atoll.node.daemon.removal.traffic import works_with_us
from atoll.node.daemon.rounds.types import AuthorExcluded, Pause
from atoll.node.daemon.standing_still.stillness import FETCHES
from atoll.protocols.errors import ConfigError, Divergence, LocalFault
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Entry, Excise, Excised, Exclude
from atoll.protocols.local.standing import Exclusion


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
    are_correctable: Callable[[Iterable[Correction], Round], bool]
    """Returns whether all payloads for these corrections are held; if not, gets them until a round is final."""
    apart: OtherChains
    found: dict[PeerId, Exclusion] = field(default_factory=dict)
    """By peer; of several about one peer the one with the lowest round."""
    _reasons: dict[tuple[PeerId, PeerId], str] = field(default_factory=dict)
    """By member and author: the reason that the author of a vote gave. Only of votes that count."""
    _stuck: set[PeerId] = field(default_factory=set)
    """Members without whose work some weight would leave its range."""
    _one_by_one: bool = False
    _done: set[PeerId] = field(default_factory=set)
    """Peers that were cut off; this node, once it is paused."""

    @property
    def trouble(self) -> str:
        """Why this node trains no more, in one line; empty if it is not excluded."""
        own = self.found.get(self.context.me)
        return reason_of(own, self.context.me) if own else ""

    def on_entry(self, entry: Entry) -> None:
        """Receive what finality has of a feed."""
        self.apart.on_entry(entry)
        if isinstance(entry.body, Exclude):
            self.on_exclude(entry.author, entry.body)

    def on_pruned(self, author: PeerId) -> None:
        """The ledger let go of an author, and finality forgot it."""
        self.apart.forget(author)
        self.reducer.forget_author(author)

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
        self.apart.step()
        me, finality, at_work = self.context.me, self.machines.finality, self.machines.round.round
        for peer, first in finality.epochs.voted_out.items():
            if not self.is_excluded(peer, first):
                self._add(
                    peer, Round(first), reason_given(finality, peer, first, reasons=self._reasons), by="voters"
                )
        for peer, one in self.found.items():
            # Until its round is final others may need its vote, and a node without the model needs its snapshot.
            is_due = max(finality.deciding, at_work) >= one.round if peer == me else finality.deciding > one.round
            if peer in self._done or not is_due:
                continue
            if peer == me:
                self.machines.feed_round(Pause(self.trouble, self.context.now()))
            elif self.machines.round.phase not in FETCHES and (one.by == "owner" or works_with_us(finality, peer)):
                self.net.exclude(peer, reason_of(one, me))
            else:
                continue
            self._done.add(peer)
        # The ledger may say that what is due in the middle of a replay was done.
        if wanted(finality) and self.is_synced():
            self._look_for_corrections()

    def on_overflow(self, excised: Collection[Excised], error: Divergence) -> None:
        """Propose this no more: without the work of these members some weight would leave its range."""
        # A member can make it so, because others train against what it sends. Then its work stays, and the run
        # goes on. Of several members that are corrected together each is tried alone.
        self._one_by_one = True
        if len(excised) == 1:
            self._stuck.update(one.peer for one in excised)
        self.context.log.event("excision_failed", peers=[one.peer for one in excised], error=error.line())
        self._look_for_corrections()

    def _look_for_corrections(self) -> None:
        """Tell finality whose work this node could take out of final rounds; get what it lacks for that."""
        state = self.machines.finality
        missing = [one for one in due(state) if one.peer not in self._stuck]
        held = [one.peer for one in missing if self.are_correctable(corrections(state, (one,)), state.deciding)]
        peers = frozenset(held[:1] if self._one_by_one else held)
        if peers != state.retrievable:
            self.machines.feed_finality(CorrectionsHeld(peers))

    def is_excluded(self, peer: PeerId, number: int) -> bool:
        """Whether a peer is excluded from this round, or from one before it."""
        return peer in self.found and self.found[peer].round <= number

    def check_resume(self) -> None:
        """Raise ConfigError if this node must not train."""
        if self.context.me in self._done:
            raise ConfigError(self.trouble, hint="only a new identity can join, where the run admits it")

    def exclude(self, peer: PeerId, first: Round | None, reason: str, since: Round | None = None) -> str:
        """Write that `peer` is excluded, or vote for it. See `NodeControl`. Returns a line for the user."""
        state, me = self.machines.finality, self.context.me
        number = first_excluded(state, peer, first)
        if not self.is_synced():
            raise LocalFault("the node has not compared ledgers with a peer yet", hint="try again in a moment")
        if since is not None:
            return self._excise(peer, number, reason, since)
        if self.is_excluded(peer, number):
            return f"{peer} is excluded from round {self.found[peer].round} on already"
        is_new = state.epochs.votes_against.get(me, {}).get(peer, number + 1) > number
        if is_new:
            self._publish(Exclude(number, peer, reason))
        if me != self.context.spec.owner:
            return vote_line(self.machines.finality, peer)
        return f"{peer} is excluded from round {number} on"

    def _excise(self, peer: PeerId, number: Round, reason: str, since: Round) -> str:
        state, me = self.machines.finality, self.context.me
        if peer in state.excised:
            return f"the work of {peer} was taken out in round {state.excised[peer].round} already"
        since = first_excised(state, peer, since)
        # So whoever wants the correction can serve all of its payloads to those that came later.
        if not self.are_correctable(corrections(state, (Excised(peer, since),)), state.deciding):
            raise LocalFault(
                "this node lacks payloads of the rounds to correct, and is getting them",
                hint="try again in a minute",
            )
        asked = state.epochs.to_excise if me == self.context.spec.owner else state.epochs.excise_votes.get(me, {})
        if asked.get(peer, since + 1) > since:
            self._publish(Excise(number, peer, reason, since))
        what = f"its work since round {since}"
        if me != self.context.spec.owner:
            return f"{vote_line(self.machines.finality, peer)}; with as many for it they take out {what}"
        return f"{peer} is excluded from round {number} on; a final round soon takes out {what}"

    def _publish(self, body: Exclude) -> None:
        if self.guard.publish(body) is None:
            raise LocalFault("the disk refused the record", hint="see `atoll status`")

    def shown(self) -> tuple[Exclusion, ...]:
        """Who is excluded, and what of its work is taken out."""
        state = self.machines.finality
        return tuple(
            replace(one, excise_since=since_of(state, peer), excised_in=done and done.round)
            for peer, one, done in ((peer, one, state.excised.get(peer)) for peer, one in self.found.items())
        )
