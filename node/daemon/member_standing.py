"""What each member counts for at this moment: its vote, the weight of its work, its Reductions. For the status.

Three rules take something from a member: probation (protocols/ledger/probation.py), audits (protocols/audits/),
and distrust of reducers that lied, did not answer or missed final sets (reduction/). Nothing is decided here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from atoll.node.daemon.consensus.types import FinalityState
from atoll.node.daemon.standing_still.absent_members import TWO_HISTORIES
from atoll.protocols.audits.shown_work import ShownWork
from atoll.protocols.audits.standing import Judgement
from atoll.protocols.errors import counted
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.probation import Tally, scaled
from atoll.protocols.local.standing import Standing

MOST = 64
"""Most members that a status names: an open run may have a thousand on probation."""
HINT = "see what `atoll doctor` says of this machine; the weight is back as soon as new verdicts show work"


class Audits(Protocol):
    """What the auditor knows (audits/auditor.py)."""

    judgement: Judgement
    """What verdicts say for the round after the newest final one."""
    made: int
    """Audits whose forward passes this node made."""
    adopted: int
    """Audits of which an evaluator's finding was adopted."""
    sharers: Mapping[PeerId, int]
    """Contributions to the newest final round with the payload of each of its authors."""
    parts_16: Mapping[PeerId, int]
    """16ths of the weights that these claim that copies leave."""


class AuditsMade(Protocol):
    """What an evaluator did for trainers (audits/for_others.py)."""

    made: int
    """Audits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStandings:
    """Reads the parts that know."""

    me: PeerId
    finality: Callable[[], FinalityState]
    auditor: Audits | None
    """None in a run without audits."""
    for_others: AuditsMade | None = None
    """What an evaluator audits for trainers; None on other nodes."""
    distrusted: Callable[[], Mapping[PeerId, int]]
    """Returns the last round in which no Reduction of a member counts here, of those of whom none does."""
    share_of: Callable[[PeerId], int] = lambda peer: 256
    """Returns 256ths of its weight that the fold gives the work of a member that may be on probation."""

    def of(self, *peers: PeerId) -> list[Standing]:
        """What each of these members counts for."""
        distrusted = self.distrusted()
        return [self._of(peer, distrusted.get(peer)) for peer in peers]

    def _of(self, peer: PeerId, until: int | None) -> Standing:
        state, audits = self.finality(), self.for_others or self.auditor
        votes_in = 0 if peer in state.voters else state.tally.missing(peer)
        verdicts, shown, usual, weight_16, why_weight = self._weight(peer)
        share_256 = self.share_of(peer)
        why = (
            TWO_HISTORIES if peer in state.equivocators else "",
            _probation(votes_in, state.tally, peer, share_256),
            why_weight,
            f"no Reduction of it counts up to round {until}" if until is not None else "",
        )
        return Standing(
            peer=peer,
            votes_in=votes_in,
            weight_16=0 if peer in state.equivocators else scaled(weight_16, share_256),
            verdicts=verdicts,
            audits_made=audits.made if audits and peer == self.me else None,
            audits_adopted=self.auditor.adopted if self.auditor and peer == self.me else None,
            shown=shown,
            usual=usual,
            distrusted_until=until,
            why="; ".join(filter(None, why)),
        )

    def diminished(self, peers: Iterable[PeerId]) -> tuple[Standing, ...]:
        """Those of the peers that count less than in full, those without weight first; MOST at most."""
        found = [each for each in self.of(*sorted(set(peers))) if each.why]
        return tuple(sorted(found, key=lambda each: (each.weight_16, each.votes_in))[:MOST])

    def trouble(self) -> str:
        """Why this node works in vain, with what to do; empty if it does not."""
        *_, weight_16, why = self._weight(self.me)
        return f"this node's work has {why}; {HINT}" if weight_16 == 0 else ""

    def _weight(self, peer: PeerId) -> tuple[int | None, float | None, float | None, int, str]:
        """Number of verdicts, deviations that they and usual ones show, 16ths of the weight, and why not all."""
        if self.auditor is None:
            return None, None, None, 16, ""
        judgement, sharers = self.auditor.judgement, self.auditor.sharers.get(peer, 1)
        found = judgement.heard.get(peer)
        shown, usual, enough = judgement.shown(peer)
        count, auditors = (found.count, len(found.by_auditor)) if found else (0, 0)
        measured = f"{count} verdicts of {auditors} members show {shown:.1f} deviations of work"
        if peer in judgement.gone:
            why, weight_16 = f"no weight: {measured}, {usual:.1f} are usual, {enough:.1f} would do", 0
        elif (part_16 := self.auditor.parts_16.get(peer, 16)) < 16 and sharers > 1:
            why, weight_16 = f"a share of a weight: {sharers} members sent one payload", max(1, part_16)
        else:
            why, weight_16 = "", 16
        return count, round(shown, 2), round(usual, 2), weight_16, why


def _probation(votes_in: int, tally: Tally, peer: PeerId, share_256: int) -> str:
    """What probation takes from a member. Where all that worked long are gone it may vote, or weigh, in full."""
    shown, sets = isinstance(tally, ShownWork), Tally.missing(tally, peer)  # weight follows from sets alone
    less = f"has {share_256}/256 of its weight" if share_256 < 256 else ""
    less += f" for {counted(sets, 'more final round')} with its work" if less and (shown or not votes_in) else ""
    if not votes_in:
        return f"{less} (probation)" if less else ""
    if shown and tally.counts.get(peer, 0) >= tally.probation:
        return "votes once verdicts of voters show enough of its work (probation)"
    by = ", once verdicts of voters show it" * shown
    by += f", and {less}{'' if shown else ' until then'}" * bool(less)
    return f"votes after {counted(votes_in, 'more final round')} with its work{by} (probation)"
