"""The round as a pure state machine: `step(state, event) -> (state, actions)`. Rules in words: docs/rounds.md.

No clock, no network, no randomness: events carry the time. Every event first becomes a fact of the state
(facts.py); then the moves below change the phase as far as the facts allow.

With overlap (`RoundConfig.overlap_steps`) one round may be in flight: it is collected and folded while the next
one is trained. TRAIN and COLLECT name the newest round in `round` and the one that is collected in `collecting`.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from atoll.node.daemon.rounds import absence, overlap_depth
from atoll.node.daemon.rounds import types as round_types
from atoll.node.daemon.rounds.facts import Out, apply_event, collect, enter
from atoll.node.daemon.rounds.leaps import is_ahead
from atoll.node.daemon.rounds.participants import RoundBook, quorum_of, slot_of
from atoll.node.daemon.rounds.queries import (
    attendance,
    catches_up_until,
    closes_at,
    comes_too_late,
    few_members,
    has_joined_in_vain,
    in_flight,
    is_resolving,
    late_by,
    may_do_more,
    may_train_on,
    missing_payloads,
    newest_open,
    next_round,
    own_set,
    waits_for_disk,
    worked_in,
)
from atoll.node.daemon.rounds.state import RESTING, WORKING, Phase, RoundConfig, RoundState
from atoll.protocols.ids import Round
from atoll.protocols.ledger.records import set_digest
from atoll.protocols.ledger.registers import Activity

_ACTIVITY: Mapping[Phase, Activity] = {
    Phase.SYNC: "syncing",
    Phase.CATCH_UP: "syncing",
    Phase.GATHER: "training",
    Phase.JOIN: "syncing",
    Phase.TRAIN: "training",
    Phase.COLLECT: "training",
    Phase.FOLD: "training",
    Phase.OBSERVE: "observing",
    Phase.PAUSED: "paused",
    Phase.FULL: "paused",
    Phase.DONE: "done",
    Phase.FINISHED: "done",
}
"""What other members read in our lease in each phase."""

_WAITING = (Phase.GATHER, Phase.JOIN)


def begin(config: RoundConfig) -> RoundState:
    """The state of a node that has just started."""
    most = max(config.overlap_steps, config.overlap_most)
    state = RoundState(config, overlap_depth.begin(config.overlap_steps, most))
    return state if config.has_worker else replace(state, phase=Phase.OBSERVE)


def step(state: RoundState, *events: round_types.Event) -> Out:
    """The next state after these events, which happened together, and the actions that the node must perform."""
    actions: list[round_types.Action] = []
    for event in events:
        # One that was queued behind a later one must not turn time back: graces and leases only ever run out.
        state = replace(state, now=event.now) if event.now > state.now else state
        state, more = apply_event(state, event)
        actions += more
    # Most events come while there is nothing to do in a round, or only to close it.
    passes = _PASSES if may_do_more(state) else () if state.phase is Phase.TRAIN else _COLLECTING
    for moves in passes:
        before = state
        for move in moves:
            state, more = move(state)
            actions += more
        if state is before:
            break  # a pass that moves nothing moves nothing again
    return _publish_lease(state, actions)


def _end_catch_up(state: RoundState) -> Out:
    """After WorkerReady: wait for the payloads of open rounds, a lease at most; then go where the others are."""
    if state.phase is not Phase.CATCH_UP or state.syncing:
        return state, []
    if not state.config.has_worker:
        return _observe(state), []
    if not state.ready:
        return state, []
    # Payloads of rounds beyond the open window count too: they show that finality is far ahead of this node.
    if missing_payloads(state) and state.now < catches_up_until(state):
        return state, []
    numbers = [*state.books, *state.saving, *(p.round for p in state.unannounced)]
    ours = [number for number in numbers if number > state.closed and worked_in(state, number)]
    if not ours and state.config.observes:
        return _observe(state), []
    if not ours:
        return enter(state, Phase.FOLD, state.round), []
    newest = max(ours)
    if not state.config.overlap_steps:
        return collect(replace(state, round=newest), newest), []
    # With overlap the round before may have been in flight when the worker ended: it is collected first again.
    first = newest - 1 if newest - 1 in ours else newest
    return collect(replace(state, round=newest, closed=max(state.closed, first - 1)), first), []


def _overlap_next(state: RoundState) -> Out:
    """With overlap: the next round begins while ours is collected."""
    if not may_train_on(state):
        return state, []
    return _start_training(state, state.round + 1, state.round)


def _close(state: RoundState) -> Out:
    """A round closes when all expected contributions are held, or a quorum of them is and the grace is over."""
    if state.phase is Phase.COLLECT and state.round <= state.final:
        return enter(state, Phase.FOLD, state.round), []
    if state.phase not in WORKING or state.collecting <= state.closed:
        return state, []
    awaited, there = attendance(state)
    reached = len(there) >= quorum_of(len(awaited), state.config.quorum_256)
    # The first time counts, even if the quorum is missed again: else who comes and goes would stop the grace.
    if reached and state.quorum_at is None:
        state = replace(state, quorum_at=state.now)
    if not awaited <= state.awaited:
        state = absence.after_wait(state, awaited)
    lacking = awaited - there
    if lacking and state.now < closes_at(state, lacking):
        return state, []
    state = absence.after_close(state, awaited)
    return (state if in_flight(state) else enter(state, Phase.FOLD, state.round)), []


def _note_left_rounds(state: RoundState) -> Out:
    """Tell finality of rounds that the others left while this node trains on: it votes for their sets.

    Else a third of slow members would stop finality for as long as their steps take. Nothing is folded.
    """
    if state.phase is not Phase.TRAIN or not state.config.most_age:
        return state, []
    actions: list[round_types.Action] = []
    left = dict(state.left)
    for number in range(state.final + 1, next_round(state)):
        names = own_set(state, number)
        if names and left.get(number) != names:
            left[number] = names
            actions.append(round_types.LeaveRound(Round(number), names))
    return (replace(state, left=left) if actions else state), actions


def _fold_changed_sets(state: RoundState) -> Out:
    """Fold every closed round whose set is not what the worker's view holds."""
    if not _may_fold(state):
        return state, []
    # Between two rounds also what the others left behind is folded: the next round starts from their view.
    last = max(state.closed, next_round(state) - 1) if state.phase is Phase.FOLD else state.closed
    # One fold of a round at a time: the answer does not name its set.
    changed = [at for at, book in state.books.items() if at <= last and state.settled.get(at) is not book]
    if not changed:
        return state, []  # nearly always, and this is asked twice at every event
    actions: list[round_types.Action] = []
    folding, still = dict(state.folding), dict[int, RoundBook]()
    for number in sorted(at for at in changed if at not in folding):
        if number in state.reduced and number not in state.resolving:
            state = replace(state, resolving={**state.resolving, number: True})
            actions.append(round_types.ResolveSet(Round(number)))
        names = state.reduced.get(number, own_set(state, number))
        if names is not None and names != state.folded.get(number, ()):
            folding[number] = names
            actions.append(round_types.FoldRound(Round(number), names))
        elif number not in state.reduced:
            still[number] = state.books[number]
    if still:
        state = replace(state, settled={**state.settled, **still})
    return (replace(state, folding=folding) if actions else state), actions


def _go_on_when_folded(state: RoundState) -> Out:
    """Everything is folded: acknowledge the sets, then start the next round or rest."""
    if state.folding or is_resolving(state) or not _may_fold(state):
        return state, []
    state, actions = _acknowledge(state)
    if state.phase is Phase.FOLD:
        return _begin_next(state, actions)
    return _collect_newest(state), actions


def _may_fold(state: RoundState) -> bool:
    """With overlap the worker folds while it trains; else only between two rounds."""
    overlapped = state.config.overlap_steps > 0 and state.phase in WORKING
    return overlapped or state.phase is Phase.FOLD or state.phase in RESTING


def _collect_newest(state: RoundState) -> RoundState:
    """The round in flight is folded, or final: the one at hand is collected next, once it is trained."""
    if state.phase not in WORKING or not in_flight(state) or state.collecting > state.closed:
        return state
    if state.phase is Phase.TRAIN:
        return replace(state, collecting=-1)
    return collect(state, state.round)


def _acknowledge(state: RoundState) -> Out:
    """Acknowledge the set of each closed round, once for each set: it may still grow by late contributions."""
    actions: list[round_types.Action] = []
    if state.acked == state.folded:
        return state, actions  # nearly always, and this is asked at every event
    acked = dict(state.acked)
    for number in sorted(state.folded):
        names = state.folded[number]
        if number <= state.closed and names and acked.get(number) != names:
            acked[number] = names
            actions.append(round_types.PublishAck(Round(number), names, set_digest(list(names)), state.view))
    return (replace(state, acked=acked) if actions else state), actions


def _begin_next(state: RoundState, actions: list[round_types.Action]) -> Out:
    """Start the next round, or enter the phase of what prevents it."""
    if state.config.observes:
        return _observe(state), actions
    number = next_round(state)
    # Rounds that are skipped are closed: the others left them, and work on them would come too late.
    state = replace(state, closed=max(state.closed, number - 1))
    if number >= state.config.rounds:
        return enter(state, Phase.DONE, state.config.rounds), actions
    if state.resting or state.held or state.refused:
        return enter(state, Phase.PAUSED, number), actions
    # Open rounds keep their payloads, so the window bounds the disk; a node beyond it waits for finality.
    if number > newest_open(state) or waits_for_disk(state, number):
        return enter(state, Phase.FULL, number), actions
    if number == 0 and not state.books and (few_members(state) or state.shortage):
        return enter(state, Phase.GATHER, number), actions
    if worked_in(state, number):
        return collect(replace(state, round=number), number), actions
    if is_ahead(state, number):
        return enter(state, Phase.JOIN, number), actions
    if comes_too_late(state, number):
        # A lease at the most: who is late by what others say of themselves must not wait for them for ever.
        joins_at = state.now + state.config.lease_s if state.joins_at is None else state.joins_at
        return enter(replace(state, joins_at=joins_at), Phase.JOIN, number), actions
    state, start = _start_training(state, number, -1, late_by(state, number))
    return state, actions + start


def _observe(state: RoundState) -> RoundState:
    """Rest as a node that does not train: its view stays Θ_final, and it acknowledges nothing."""
    number = next_round(state)
    if number >= state.config.rounds:
        return enter(state, Phase.DONE, state.config.rounds)
    return enter(state, Phase.PAUSED if state.resting or state.held else Phase.OBSERVE, number)


def _start_training(state: RoundState, number: int, after: int, late_s: float = 0.0) -> Out:
    """Start round `number`, with round `after` in flight; -1: none. `late_s`: how long ago others began it."""
    slot, slots = slot_of(state.config.me, number, state.members, int(state.config.overlap_steps > 0))
    # Who waited for the others in vain does not wait for them again.
    joins_at = state.joins_at if has_joined_in_vain(state) else None
    state = enter(replace(state, collecting=after, joins_at=joins_at), Phase.TRAIN, number)
    return state, [round_types.StartTraining(Round(number), slot, slots, after, late_s)]


def _end_rest(state: RoundState) -> Out:
    """Leave GATHER, PAUSED and FULL when their reason is gone; DONE when all rounds are final.

    A node that only observes goes on to the round that the others are in.
    """
    if state.phase is Phase.DONE and state.final >= state.config.rounds - 1:
        return enter(state, Phase.FINISHED, state.round), [round_types.Finish()]
    rests = (*_WAITING, Phase.OBSERVE, Phase.PAUSED, Phase.FULL)
    if state.folding or is_resolving(state) or state.phase not in rests:
        return state, []
    if state.config.observes:
        return _observe(state), []
    after, _ = _begin_next(state, [])
    if after.phase is state.phase:
        return state, []
    # Through FOLD, not straight into the round: the rounds that the others left meanwhile are folded first.
    return enter(state, Phase.FOLD, state.round), []


_PASS = (_note_left_rounds, _fold_changed_sets, _overlap_next, _close, _fold_changed_sets, _go_on_when_folded)
# Two passes, because the first may end in a phase that its earlier moves act upon: a rest that ends goes to FOLD,
# and a round of which all is here already is collected, closed and folded within the event. Folds stand on both
# sides of the close, so that late contributions to closed rounds are folded before a new round trains on. A third
# pass moves nothing: measured over the 480,000 steps of tests/node/daemon/rounds.
_PASSES = ((_end_catch_up, *_PASS, _end_rest), _PASS)
_COLLECTING = ((_close,), *_PASSES)


def _publish_lease(state: RoundState, actions: list[round_types.Action]) -> Out:
    # Once an event, after all moves: other members need not see phases that were only passed through.
    # A member that is done counts among those that others catch up with; who trained nothing does not.
    activity: Activity = "observing" if state.config.observes else _ACTIVITY[state.phase]
    lease = (activity, state.round)
    if lease == state.leased:
        return state, actions
    return replace(state, leased=lease), [*actions, round_types.PublishLease(lease[0], Round(lease[1]))]
