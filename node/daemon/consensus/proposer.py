"""The proposer's part of finality: when this node opens a ballot, and which set it proposes in it. Pure."""

from collections.abc import Collection
from itertools import cycle, islice

from atoll.node.daemon.consensus.excision import able
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.inherited import inherited
from atoll.node.daemon.consensus.presence import here_of
from atoll.node.daemon.consensus.types import Action, FinalityState
from atoll.node.daemon.consensus.voter import (
    Out,
    append,
    is_folded_here,
    may_append,
    may_get_votes,
    names_excluded,
)
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import bound_proposals, named_by, owner_of, quorum
from atoll.protocols.ledger.choices import Choice, choice_of
from atoll.protocols.ledger.records import (
    MAX_EXCLUDED,
    Ballot,
    ExcisingProposal,
    ExcludingProposal,
    Prepare,
    Proposal,
    SummaryProposal,
    set_digest,
)

PATIENCE_ROUNDS = 2.0
MIN_PATIENCE_S = 3.0
"""Patience with a proposer: this many round times, and at least so many seconds."""


def patience_of(train_s: float, lease_s: float) -> float:
    """The patience with a proposer, in seconds, from the own round time; 0 before the first round is trained."""
    # Who just came up knows no round time. If it were hasty, it would open ballots far ahead of all others, and
    # its promises would keep it from voting in theirs.
    return max(MIN_PATIENCE_S, PATIENCE_ROUNDS * train_s if train_s else lease_s)


def propose(state: FinalityState) -> Out:
    """Propose in the highest ballot that is ours, if it is time and nothing was proposed in it."""
    ballot = _own_ballot(state)
    if ballot is None or not may_append(state):
        return state, []
    choice = _choice_to_propose(state, ballot)
    if choice is None:
        return state, []
    state, ready, actions = is_folded_here(state, choice, state.me)
    if not ready:
        return state, actions
    number, digest = state.deciding, state.checked[choice.folded]
    if choice.excluded:
        return append(state, ExcludingProposal(number, ballot, choice.names, digest, choice.excluded))
    if choice.excised:
        return append(state, ExcisingProposal(number, ballot, choice.names, digest, choice.excised))
    # Only in the first attempt: whoever computes another summary delays the round, and does not stop it.
    if ballot.attempt == 0 and (summary := state.own_summary) is not None:
        return append(state, SummaryProposal(number, ballot, choice.names, digest, summary))
    return append(state, Proposal(number, ballot, choice.names, digest))


def prepare(state: FinalityState) -> Out:
    """Open the next ballot of ours when nothing became final for too long."""
    # Without a quorum no ballot gets anywhere, and those that pile up meanwhile make the later waits longer.
    if state.short_since is not None:
        return state, []
    view = state.views.get(state.deciding)
    if not view or not may_append(state):
        return state, []
    after = state.attempt + 1  # ours is the next one of our place in the order of voters
    attempt = after + (state.voters.index(state.me) - after) % len(state.voters)
    if not _is_its_turn(state, attempt, view):
        return state, []
    state, able, actions = _could_propose(state)
    if not able:
        return state, actions
    return append(state, Prepare(state.deciding, Ballot(attempt, state.me, state.epoch)))


def _is_its_turn(state: FinalityState, attempt: int, view: tuple[Digest, ...]) -> bool:
    """Whether those whose turn comes before this attempt had it."""
    # The wait grows with the owner's place, so that owners take turns, and with every n attempts, so that two
    # owners do not cut off each other's ballots for ever.
    before_s = _turns_s(state, attempt)
    # One that is here and has no turn proposes that set itself now, if it does not lie: a ballot would cut it off.
    has_rivals = not state.turns.without.isdisjoint(state.voters[state.attempt : attempt])
    if not before_s and not has_rivals and _is_acknowledged(state, view):
        return True  # an owner that is gone would propose now
    return state.stable_since is not None and waited_s(state) >= before_s


def _turns_s(state: FinalityState, attempt: int) -> float:
    """Seconds that the owners before this attempt have, from that of the newest ballot on."""
    return waits(state, attempt) * (1 + state.attempt // len(state.voters)) * state.patience_s


def waited_s(state: FinalityState) -> float:
    """Seconds since the newest ballot, or its proposal, began to count; 0 while the set may grow."""
    stable = state.stable_since
    return 0.0 if stable is None else state.now - max(state.since, stable)


def waits(state: FinalityState, attempt: int) -> int:
    """How many owners that are here have their turn before this attempt, from the newest that counts on."""
    there = able_voters(state)
    # A member that was killed has a lease for many round times. That its connection is lost proves nothing, but an
    # owner that lives loses no more than a ballot by it. Nor does one whose turns passed unused of late. Only the
    # first time round: members of which each lost the others would else cut off each other's ballots for ever.
    if state.attempt < len(state.voters):
        there = {*there} - state.lost - state.turns.without
    first = state.attempt % len(state.voters)
    owners = islice(cycle(state.voters), first, first + attempt - state.attempt)
    return sum(map(there.__contains__, owners))


def able_voters(state: FinalityState) -> Collection[PeerId]:
    """The voters that may take part in a ballot now, as far as this node knows."""
    # Of a run whose voters were killed by the dozen each would cost the others a patience. Who just came up does
    # not know who is there before a lease has passed.
    knows = state.live and state.now - state.live_since >= state.lease_s
    return here_of(state, state.voters) if knows else _not_left(state)


def _not_left(state: FinalityState) -> set[PeerId]:
    book, known = state.epochs, {*state.voters} - state.equivocators  # nobody gets more of their entries
    number, epoch = state.deciding, state.epoch
    return known - {peer for peer in known & book.left.keys() if book.has_left(peer, number, epoch)}


def _own_ballot(state: FinalityState) -> Ballot | None:
    """Our ballot of the newest attempt, if it is open, empty and not below our own promise."""
    book = state.book
    if state.attempt == 0 and owner_of(state.voters, 0) == state.me:
        ballot = Ballot(0, state.me, state.epoch)  # ballot 0 needs no Prepare: no lower one can hold a vote
    else:
        ours = [b for b in book.prepares if b.proposer == state.me and b.attempt == state.attempt]
        if not ours or owner_of(state.voters, ours[0].attempt) != state.me:
            return None
        ballot = ours[0]
    bound = book.promised(state.me)
    return None if ballot in book.first_proposals() or (bound is not None and bound > ballot) else ballot


def _choice_to_propose(state: FinalityState, ballot: Ballot) -> Choice | None:
    """What to propose in a ballot of ours; None while it is too early."""
    book, view = state.book, state.views.get(state.deciding)
    if view and (not state.refuted.isdisjoint(view) or names_excluded(state, view) or book.is_over(view)):
        view = None  # it is being folded again
    if ballot.attempt == 0:
        before = inherited(state)
        if before and may_get_votes(state, ballot, before):
            return before
        return _own_choice(state, view) if view and _is_time(state, view) else None
    bound = bound_proposals(book, state.voters, ballot, state.equivocators)
    if bound is None:
        return None
    if not bound:
        return _own_choice(state, view) if view else None
    # A quorum may have voted for this set: repeating it is the only safe choice, whatever our own view is.
    if bound[0] not in book.proposals:
        return None  # it has not arrived yet
    choice = choice_of(book.proposals[bound[0]])
    return choice if may_get_votes(state, ballot, choice) else None


def _own_choice(state: FinalityState, view: tuple[Digest, ...]) -> Choice:
    # Exclusions first: what is to be taken out, or a summary, waits for a round without any.
    excluded = outvoted(state, view)[:MAX_EXCLUDED]
    return Choice(view, () if excluded else able(state), excluded)


def _is_time(state: FinalityState, view: tuple[Digest, ...]) -> bool:
    """Whether our set may be proposed in ballot 0: a quorum acknowledged it, or it will hardly grow any more."""
    if _is_acknowledged(state, view) or state.closed > state.deciding:
        return True
    return state.idle and state.stable_since is not None and state.now - state.stable_since >= state.patience_s


def _is_acknowledged(state: FinalityState, view: tuple[Digest, ...]) -> bool:
    """Whether a quorum of the voters holds exactly our set, and it may be proposed before it is stable."""
    name, acks = set_digest(list(view)), state.book.acks
    # A set with Reductions is never proposed early: voters must have the time to open them and to report a wrong
    # one.
    early = state.book.reductions.keys().isdisjoint(view)
    return early and sum(acks.get(peer) == name for peer in state.voters) >= quorum(len(state.voters))


def _could_propose(state: FinalityState) -> tuple[FinalityState, bool, list[Action]]:
    """Whether we have what a ballot of ours needs; if not, the actions that fetch it."""
    book, count = state.book, len(state.voters)
    for (_, name), here in sorted(named_by(book.votes, state.voters).items(), reverse=True):
        # As long as a quorum may promise without a vote for a set, that set may bind no one, and our own view will
        # do.
        if here <= count - quorum(count):
            continue
        if name not in book.proposals:
            return state, False, []
        # Else the ballot may be bound to the set. A Prepare before it is folded here would only stop the ballot
        # below.
        if not book.is_void(proposal := book.proposals[name]):
            return is_folded_here(state, choice_of(proposal), proposal.ballot.proposer)
    return state, True, []
