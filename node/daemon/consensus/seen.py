"""What a step of the finality machine looks at. While it is the same, what moved nothing does so again. Pure.

Most entries are contributions, acks and payloads that change none of it, and each is an event (machine.py).
"""

from operator import attrgetter, is_
from typing import Any

from msgspec.structs import astuple

from atoll.node.daemon.consensus.forks import decided_before, meetings_of
from atoll.node.daemon.consensus.presence import here_of
from atoll.node.daemon.consensus.proposer import able_voters
from atoll.node.daemon.consensus.succession import may_have_been_away
from atoll.node.daemon.consensus.types import FinalityState
from atoll.node.daemon.consensus.voter import is_stuck
from atoll.protocols.ledger.ballots import Book, but_acks, is_quorum, owner_of

_NO_ENTRIES = Book()
_FIELDS = FinalityState.__struct_fields__
_OF_OPEN, _IN_PART, NOW = _FIELDS.index("applied"), _FIELDS.index("members"), _FIELDS.index("now")
_OF_BALLOTS = "prepares", "promises", "proposals", "votes", "epochs", "orphans", "other_votes"
_ballots_of, _but_work_of = attrgetter(*_OF_BALLOTS), attrgetter(*_OF_BALLOTS, "reductions", "bound")


def seen_by_moves(state: FinalityState) -> list[object]:
    """All that the moves look at: the facts of the state, and parts of the rest."""
    book = state.books.get(number := state.deciding, _NO_ENTRIES)
    if not state.live:
        return _seen_by_replay(state, book)
    facts, others = astuple(state), state.epochs
    # Until there is a ballot, or a set of our own, contributions and acks of the round wait for one.
    is_open = bool(book.epochs) or number in state.views
    # Of the votes in other rounds only what the order of chains depends on: many come when their round is final.
    seen: list[object] = [_work_seen(state, book, number) if is_open else None, None]
    seen += others.unvoted, others.progress
    is_asking = bool(state.equivocators or state.orphans_asked) or is_stuck(state)
    if is_asking:
        seen += [but_acks(state.books.get(segment.first, _NO_ENTRIES)) for segment in state.chain[1:]]
    elif len(state.chain) > 1:
        seen += decided_before(state)
    # Who works in the open rounds counts only where voters are gone, an epoch begins, or this node was away.
    is_short = state.short_since is not None or state.asked_since is not None or bool(state.took_part)
    is_away = bool(others.places) and may_have_been_away(state)
    is_moved = is_short or is_away or bool(others.children(state.epoch, number))
    if is_moved:
        seen += [(at, each.contributors) for at, each in state.books.items()]
    if is_moved or is_asking or state.still.tries:
        seen.append(facts[:NOW])
    else:
        seen.append(facts[: _IN_PART if is_open else _OF_OPEN])
        seen[1] = _voters_seen(state, is_open)
    if is_open:
        seen += [state.views.get(number), state.closed > number, others.votes_against, others.excise_votes]
        seen += _but_work_of(book)
        # Only who owns the ballot that is due, or may open the next one because its owner is gone, waits for acks.
        owner = owner_of(state.voters, state.attempt)
        if owner == state.me or owner in state.lost or owner not in able_voters(state):
            seen.append(book.acks)
    # Every wait is for a ballot, for a set of our own, or for one of these.
    if is_moved or state.still.tries:
        seen.append(state.now)
    elif book.prepares or number in state.views or state.stable_since is not None:
        seen.append(_time_seen(state, book))
    return seen


class _Found:
    """What follows from some objects. Equal where the same follows from others."""

    def __init__(self, source: tuple[object, ...], answer: tuple[Any, ...]) -> None:
        self.source, self.answer = source, answer

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Found) and self.answer == other.answer)


def _voters_seen(state: FinalityState, is_open: bool) -> _Found:
    """What the moves look at of live leases while no voters are missed: of all others many come and go."""
    others = state.epochs
    source = state.members, state.lost, state.voters, state.chain, state.decided, others.unvoted, is_open
    before = state.settled[1] if state.settled else None
    if isinstance(before, _Found) and all(map(is_, before.source, source)):
        return before
    # The order of chains depends on the leases of all where others work in a chain that left ours.
    weighing = state.members if others.places and meetings_of(state) else None
    here = here_of(state, state.voters)
    lost = state.lost.intersection(state.voters) if is_open else None
    return _Found(source, (weighing, lost, here if is_open else is_quorum(state.voters, here)))


def _work_seen(state: FinalityState, book: Book, number: int) -> _Found:
    """What proposals and the own set name, and how much is held. An idle node has no set but what it holds."""
    ours = state.views.get(number, ())
    source = book.contributions, book.proposals, ours, state.idle
    before = state.settled[0] if state.settled else None
    if isinstance(before, _Found) and all(map(is_, before.source, source)):
        names, held = before.answer[0], before.source[-1]
        return before if held is state.held else _Found((*source, state.held), (names, len(state.held & names)))
    named = book.contributions.keys() if state.idle and not ours else book.in_proposals
    names = named | (book.contributions.keys() & {*ours})
    return _Found((*source, state.held), (names, len(state.held & names)))


def _time_seen(state: FinalityState, book: Book) -> object:
    """What the moves look at of the time while all voters take part: it itself, or only which waits are over."""
    if book.prepares and any(ballot.attempt > state.attempt for ballot in book.prepares):
        return state.now  # each has a wait of its own (`_is_due`)
    waited_s = state.now - state.since
    over = may_have_been_away(state), waited_s >= state.patience_s / 2  # voter.py: `_all_answered`
    if state.stable_since is None:
        return over
    # Nobody opens a later ballot for want of time before the round stood still for a patience (proposer.py).
    rested_s = state.now - state.stable_since
    if min(waited_s, rested_s) >= state.patience_s:
        return state.now
    return *over, rested_s >= state.patience_s


def _seen_by_replay(state: FinalityState, book: Book) -> list[object]:
    """The same before this node takes part: then it decides, enters epochs that it chose, and counts ballots."""
    others = state.epochs
    seen: list[object] = [astuple(state)[:NOW], state.now, others.left, others.back, *_ballots_of(book)]
    # A set that is final waits for the contributions that it names, an epoch for its signatures.
    seen += [others.signers] if state.planned else []
    return [*seen, book.contributions, book.reductions] if state.missing else seen
