"""Events become facts of the RoundState: what was seen, done or ordered, before any phase moves by it. Pure."""

from collections.abc import Mapping
from typing import TypeVar

from msgspec.structs import replace

from atoll.node.daemon.rounds import absence, overlap_depth
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.leaps import came_late
from atoll.node.daemon.rounds.participants import Members, RoundBook, rounds_entered, rounds_just_left
from atoll.node.daemon.rounds.queries import (
    book_of,
    contributed,
    in_flight,
    is_excluded,
    newest_open,
)
from atoll.node.daemon.rounds.state import Phase, RoundState
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.set_limit import VIA, Arrival
from atoll.protocols.local.worker_messages import Pending

ANNOUNCE_AGAIN_S = 5.0
"""Seconds between two attempts to append a contribution that the disk refused."""

Out = tuple[RoundState, list[round_types.Action]]
V = TypeVar("V")


def apply_event(state: RoundState, event: round_types.Event) -> Out:
    """The state with the fact that `event` reports, and the actions that follow from it at once."""
    match event:  # the most frequent ones first
        case round_types.ContributionSeen():
            return _contribution_seen(state, event)
        case round_types.PayloadHeld(entry, number):
            return _payload_held(_note_arrival(state, event), entry, number), []
        case round_types.RoundTick():
            return _tick(state)
        case round_types.LeasesChanged(members, _, shortage):
            just_left = (
                rounds_just_left(state.members, members, state.just_left) if state.config.overlap_steps else {}
            )
            entered = rounds_entered(state.members, members, state.entered)
            return replace(
                state, members=Members(members), entered=entered, just_left=just_left, shortage=shortage
            ), []
        case round_types.WorkerReady():
            return _worker_ready(state, event)
        case round_types.AuthorPruned(author):
            books = {at: book.without(author) for at, book in state.books.items()}
            return _fetch_missing(replace(state, books=books))  # there may be room now
        case round_types.AuthorExcluded(author, number):
            return _fetch_missing(_author_excluded(state, author, number))
        case round_types.WorkApart(entries):
            return _with_work_apart(state, entries), []
        case round_types.ReductionPlanned(number):
            # A closed round is folded from whole payloads: a plan for it would only make the node wait for slices.
            fresh = max(state.closed, state.final) < number and number not in state.reduced
            reduced = {**state.reduced, number: None}
            return (replace(state, reduced=reduced, settled={}) if fresh else state), []
        case round_types.SetResolved(number, names):
            known = number in state.reduced
            return (replace(state, reduced={**state.reduced, number: names}) if known else state), []
        case round_types.SenioritySeen(seniority, order):
            return replace(state, set_rules=state.set_rules.after(seniority, order), settled={}), []
        case round_types.TrainingDone():
            return _training_done(state, event), []
        case round_types.TrainingRefused():
            return _training_refused(state, event), []
        case round_types.TrainingSaved():
            return _training_saved(state, event)
        case round_types.FoldDone(number, digest):
            return _fold_done(state, number, digest), []
        case round_types.Reweighed(number):
            return _reweighed(state, number), []
        case round_types.RoundFinal(number):
            return _fetch_missing(_finalized(state, number))
        case round_types.Pause(reason, now, for_s):
            return replace(state, resting=reason, rest_until=None if for_s is None else now + for_s), []
        case round_types.Resume():
            return replace(state, resting="", rest_until=None, is_spent=False), []
        case round_types.Hold(reason):
            return replace(state, held=reason), []
        case round_types.Refused(reason):
            return replace(state, refused=reason), []
        case round_types.Behind(reason):
            state = replace(state, syncing=reason, folding={}, collecting=-1)
            return enter(state, Phase.CATCH_UP, state.round), []


def enter(state: RoundState, phase: Phase, number: int) -> RoundState:
    """The state in `phase` with round `number` at hand. Its clock restarts, unless nothing changed."""
    # CATCH_UP restarts its clock even from itself: a new worker waits for payloads anew.
    if (phase, number) == (state.phase, state.round) and phase is not Phase.CATCH_UP:
        return state
    return replace(state, phase=phase, round=number, since=state.now)


def collect(state: RoundState, number: int) -> RoundState:
    """The state that waits for round `number`: the one at hand or the one before it. Nothing is trained."""
    if state.phase is not Phase.COLLECT:
        # Judged once, when the work is done: later the others go on in any case.
        state = replace(state, late=came_late(state, state.round))
    if number != state.collecting:
        state = replace(state, collecting=number, collecting_since=state.now, quorum_at=None, awaited=frozenset())
    return replace(state, phase=Phase.COLLECT, since=state.now)


def _worker_ready(state: RoundState, event: round_types.WorkerReady) -> Out:
    state = _finalized(state, Round(event.final)) if event.final > state.final else state
    actions: list[round_types.Action] = []
    for pending in event.pending:
        if pending.round <= state.final:
            actions.append(round_types.Discard(pending))
        elif not contributed(state, pending.round):
            # Saved before a crash and not in our feed: announced, not trained again. So nobody contributes twice.
            actions.append(round_types.Announce(pending))
            state = replace(state, unannounced=(*_unannounced_but(state, pending.round), pending))
    # What the old worker was asked for will never be answered; what it folded is in no view any more.
    state = replace(
        state, folding={}, folded={}, settled={}, collecting=-1, syncing="", ready=True, saving=frozenset()
    )
    state, fetches = _fetch_missing(replace(state, fetched_to=-1))
    return enter(state, Phase.CATCH_UP, state.round), actions + fetches


def _contribution_seen(state: RoundState, event: round_types.ContributionSeen) -> Out:
    body = event.contribution
    if body.round <= state.final or body.round >= state.config.rounds:
        return state, []
    if not event.held and is_excluded(state, event.author, body.round):
        return state, []  # nobody needs it, unless a final set names it
    book = book_of(state, body.round)
    # The first contribution in an author's feed counts. All nodes see one feed in one order, so all choose the
    # same, and an author cannot make the others fetch and fold its round again and again.
    if event.author in book.authors.values():
        return state, []
    book = RoundBook({**book.authors, event.entry: event.author}, book.held)
    state = replace(state, books={**state.books, body.round: book})
    state = _payload_held(state, event.entry, body.round) if event.held else state
    if event.author == state.config.me:
        state = replace(state, unannounced=_unannounced_but(state, body.round))
    if event.held or not state.ready or body.round in state.reduced:
        return state, []
    if body.round > state.final + state.config.open_rounds.least and body.round > newest_open(state):
        return replace(state, fetched_to=min(state.fetched_to, body.round - 1)), []
    return state, [round_types.FetchPayload(event.entry)]


def _author_excluded(state: RoundState, author: PeerId, number: int) -> RoundState:
    """Forget what cannot be folded of the author's work. Folds without the rest follow."""
    state = replace(state, excluded={**state.excluded, author: min(number, state.excluded.get(author, number))})
    books = {at: book.without(author) if at >= number else book for at, book in state.books.items()}
    return replace(state, books=books, settled={})


def _with_work_apart(state: RoundState, entries: frozenset[Digest]) -> RoundState:
    """Folds of the rounds whose own set may have changed follow."""
    changed = entries ^ state.apart
    settled = {at: book for at, book in state.settled.items() if changed.isdisjoint(book.authors)}
    return replace(state, apart=entries, settled=settled)


def _fetch_missing(state: RoundState) -> Out:
    """Fetches for the payloads that are missing of the open rounds, but those that were fetched for."""
    # Payloads further ahead are left alone: the open window bounds the disk that others can fill.
    last = newest_open(state)
    if not state.ready or last <= state.fetched_to:
        return state, []
    # Hundreds of rounds may become final at once. To fetch all of the others again at each would be their square.
    near = [at for at in state.books if state.fetched_to < at <= last and at not in state.reduced]
    missing = [entry for at in near for entry in state.books[at].missing]
    return replace(state, fetched_to=last), [round_types.FetchPayload(entry) for entry in missing]


def _note_arrival(state: RoundState, event: round_types.PayloadHeld) -> RoundState:
    """Remember how an author came, once, in a run that bounds newcomers."""
    rules, author = state.set_rules, book_of(state, event.round).authors.get(event.entry)
    if not rules.order.tally.newcomers or author is None or author in rules.arrivals.by_author:
        return state
    arrival = Arrival(rules.order.tally.rounds, event.line or VIA + author)
    known = rules.arrivals.noted(author, arrival, lambda: _working(state))
    return replace(state, set_rules=replace(rules, arrivals=known), settled={})


def _working(state: RoundState) -> frozenset[PeerId]:
    """The authors of rounds that are not final."""
    return frozenset(author for book in state.books.values() for author in book.authors.values())


def _payload_held(state: RoundState, entry: Digest, number: int) -> RoundState:
    book = book_of(state, number)
    if entry not in book.authors or entry in book.held:
        return state
    book = replace(book, held=book.held | {entry})
    state = replace(state, books={**state.books, number: book})
    return absence.after_payload(state, book.authors[entry], number)


def _training_done(state: RoundState, event: round_types.TrainingDone) -> RoundState:
    """The node goes on at once; the work is announced when it is safe on the disk."""
    at_hand = state.phase is Phase.TRAIN and event.round == state.round
    number = event.pending.round  # a later one than was trained, where the base may be older
    step_s = event.train_s / max(1, event.pending.steps)
    # With the steps that were left out: graces and patience are shares of the time that a whole round takes.
    state = replace(state, train_s=event.train_s + event.left_out * step_s, step_s=step_s)
    if event.lag is not None:
        state = replace(state, ahead=overlap_depth.measured(state.ahead, event.lag))
    state = replace(state, saving=state.saving | {number})
    if number <= state.final:
        return enter(state, Phase.FOLD, state.round) if at_hand else state
    if at_hand:
        state = replace(state, round=number)
        # A round in flight is collected before the one that was just trained.
        state = collect(state, state.collecting if in_flight(state) else state.round)
    return state


def _training_refused(state: RoundState, event: round_types.TrainingRefused) -> RoundState:
    """The node rests; a round of its own that is in flight is collected and folded first."""
    state = replace(state, resting=event.reason, rest_until=None, is_spent=True)
    if state.phase is not Phase.TRAIN or event.round != state.round:
        return state
    if in_flight(state):
        return collect(replace(state, round=Round(state.collecting)), state.collecting)
    return enter(state, Phase.FOLD, state.round)


def _training_saved(state: RoundState, event: round_types.TrainingSaved) -> Out:
    """Announce the work, and older work whose announcement the disk refused."""
    # Work that ended after the node fell behind (CATCH_UP) is late, and announced all the same: it may count.
    state = replace(state, saving=state.saving - {event.pending.round})
    if event.pending.round <= state.final:
        return state, [round_types.Discard(event.pending)]
    state, again = _announce_again(replace(state, unannounced=_unannounced_but(state, event.pending.round)))
    return replace(state, unannounced=(*state.unannounced, event.pending)), [
        *again,
        round_types.Announce(event.pending),
    ]


def _unannounced_but(state: RoundState, number: int) -> tuple[Pending, ...]:
    """Unannounced work of all rounds but `number`."""
    return tuple(pending for pending in state.unannounced if pending.round != number)


def _announce_again(state: RoundState) -> Out:
    """Announce all that the disk refused so far; discard what became final meanwhile."""
    late = [pending for pending in state.unannounced if pending.round <= state.final]
    rest = tuple(pending for pending in state.unannounced if pending.round > state.final)
    state = replace(state, unannounced=rest, announced_at=state.now)
    return state, [*map(round_types.Discard, late), *map(round_types.Announce, rest)]


def _fold_done(state: RoundState, number: int, digest: Digest) -> RoundState:
    if number not in state.folding:  # asked of a worker that is gone
        return state
    folding = {at: names for at, names in state.folding.items() if at != number}
    folded = {**state.folded, number: state.folding[number]} if number > state.final else state.folded
    return replace(state, folding=folding, folded=folded, view=digest)


def _reweighed(state: RoundState, number: int) -> RoundState:
    """The state as if the round, closed or not, had never been folded; a fold that is under way counts as none."""
    folded = {at: names for at, names in state.folded.items() if at != number}
    acked = {at: names for at, names in state.acked.items() if at != number}
    folding = {**state.folding, number: ()} if number in state.folding else state.folding
    settled = {at: book for at, book in state.settled.items() if at != number}
    return replace(state, folded=folded, acked=acked, folding=folding, settled=settled)


def _finalized(state: RoundState, number: int) -> RoundState:
    """The state after round `number` became final: all that was known of it and of older rounds is forgotten."""
    if number <= state.final:
        return state
    return replace(
        state,
        final=number,
        closed=max(state.closed, number),
        books=_above(number, state.books),
        folding=_above(number, state.folding),
        folded=_above(number, state.folded),
        settled=_above(number, state.settled),
        acked=_above(number, state.acked),
        left=_above(number, state.left),
        reduced=_above(number, state.reduced),
        resolving=_above(number, state.resolving),
    )


def _above(number: int, by_round: Mapping[int, V]) -> dict[int, V]:
    return {at: value for at, value in by_round.items() if at > number}


def _tick(state: RoundState) -> Out:
    if state.rest_until is not None and state.now >= state.rest_until:
        state = replace(state, resting="", rest_until=None, is_spent=False)
    due = state.now - state.announced_at >= ANNOUNCE_AGAIN_S
    return _announce_again(state) if state.unannounced and due and state.ready else (state, [])
