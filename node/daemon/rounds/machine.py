"""The round as a pure state machine: `step(state, event) -> (state, actions)`. Rules in words: docs/rounds.md.

With overlap (`RoundConfig.overlap_steps`) one round may be in flight: it is collected and folded while the next
one is trained. TRAIN and COLLECT name the newest round in `round` and the one that is collected in `collecting`.

No clock, no network, no randomness: events carry the time. Every event first becomes a fact of the
state; then `_settle` moves the phases as far as the facts allow.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from atoll.node.daemon.rounds import overlap_depth as ahead
from atoll.node.daemon.rounds.participants import chosen, enough, known_of, slot_of, walked
from atoll.node.daemon.rounds.queries import (
    MORE_ROOM,
    all_known,
    attendance,
    came_late,
    closes_at,
    contributed,
    few_members,
    in_flight,
    is_settling,
    may_train_on,
    must_wait,
    next_round,
    present,
    worked_in,
)
from atoll.node.daemon.rounds.types import (
    Action,
    Announce,
    Behind,
    ContributionSeen,
    Discard,
    Event,
    FetchPayload,
    Finish,
    FoldDone,
    FoldRound,
    LeasesChanged,
    Pause,
    PayloadHeld,
    Phase,
    Planned,
    PublishAck,
    PublishLease,
    Resume,
    RoundConfig,
    RoundFinal,
    RoundState,
    RoundTick,
    SetKnown,
    Settle,
    StartTraining,
    TrainingDone,
    TrainingSaved,
    WorkerReady,
)
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.records import set_digest
from atoll.protocols.ledger.registers import Activity
from atoll.protocols.local.worker_messages import Pending

ANNOUNCE_AGAIN_S = 5.0
"""A contribution that the disk refused is offered to it again so often."""

_ACTIVITY: Mapping[Phase, Activity] = {
    Phase.SYNC: "syncing",
    Phase.CATCH_UP: "syncing",
    Phase.GATHER: "training",
    Phase.TRAIN: "training",
    Phase.COLLECT: "training",
    Phase.FOLD: "training",
    Phase.PAUSED: "paused",
    Phase.FULL: "paused",
    Phase.DONE: "done",
    Phase.FINISHED: "done",
}
_RESTING = (Phase.GATHER, Phase.PAUSED, Phase.FULL, Phase.DONE, Phase.FINISHED)
_WORKING = (Phase.TRAIN, Phase.COLLECT)

Out = tuple[RoundState, list[Action]]


def begin(config: RoundConfig) -> RoundState:
    """The state of a node that has just started."""
    return RoundState(config, ahead.begin(config.overlap_steps, max(config.overlap_steps, config.overlap_most)))


def step(state: RoundState, event: Event) -> Out:
    """Next state, and what to do about it."""
    state, actions = _take(replace(state, now=max(state.now, event.now)), event)
    for move in _MOVES:
        state, more = move(state)
        actions += more
    return _lease(state, actions)


# --- events become facts ------------------------------------------------------------------------


def _take(state: RoundState, event: Event) -> Out:
    match event:
        case WorkerReady():
            return _ready(state, event)
        case ContributionSeen():
            return _seen(state, event)
        case PayloadHeld(entry, number):
            return _held(state, entry, number), []
        case Planned(number):
            fresh = max(state.closed, state.final) < number and number not in state.reduced
            return (replace(state, reduced={**state.reduced, number: None}) if fresh else state), []
        case SetKnown(number, names):
            known = number in state.reduced
            return (replace(state, reduced={**state.reduced, number: names}) if known else state), []
        case LeasesChanged(members, _, shortage):
            walks = walked(state.members, members, state.walks) if state.config.overlap_steps else {}
            return replace(state, members=dict(members), walks=walks, shortage=shortage), []
        case TrainingDone():
            return _trained(state, event)
        case TrainingSaved():
            return _kept(state, event)
        case FoldDone(number, digest):
            return _folded(state, number, digest), []
        case RoundFinal(number):
            after = _finalized(state, number)
            return after, _wanted(after, newest=state.final + state.config.max_open_rounds)
        case Pause(reason):
            return replace(state, resting=reason), []
        case Resume():
            return replace(state, resting=""), []
        case Behind(reason):
            state = replace(state, syncing=reason, folding={}, collecting=-1)
            return _enter(state, Phase.CATCH_UP, state.round), []
        case RoundTick():
            return _tick(state)


def _ready(state: RoundState, event: WorkerReady) -> Out:
    state = _finalized(state, Round(event.final)) if event.final > state.final else state
    actions: list[Action] = []
    for pending in event.pending:
        if pending.round <= state.final:
            actions.append(Discard(pending))
        elif not contributed(state, pending.round):
            actions.append(Announce(pending))
            state = replace(state, unannounced=(*_others(state, pending.round), pending))
    state = replace(state, folding={}, folded={}, collecting=-1, syncing="", ready=True, saving=frozenset())
    actions += _wanted(state, newest=-1)
    return _enter(state, Phase.CATCH_UP, state.round), actions


def _seen(state: RoundState, event: ContributionSeen) -> Out:
    body = event.contribution
    if body.round <= state.final or body.round >= state.config.rounds:
        return state, []
    book = dict(state.books.get(body.round, {}))
    if any(known.author == event.author for known in book.values()):  # the first in its feed counts
        return state, []
    known = known_of(event.entry, event.author, body, event.held)
    book[event.entry] = known
    state = replace(state, books={**state.books, body.round: book})
    if event.author == state.config.me:
        state = replace(state, unannounced=_others(state, body.round))
    near = body.round <= state.final + state.config.max_open_rounds
    if event.held or not state.ready or not near or body.round in state.reduced:
        return state, []
    return state, [FetchPayload(event.entry)]


def _wanted(state: RoundState, newest: int) -> list[Action]:
    """What is missing of the rounds above `newest` that may be open: disk is bounded by the open window."""
    if not state.ready:
        return []
    last = state.final + state.config.max_open_rounds
    near = [k for k in all_known(state) if newest < k.round <= last and k.round not in state.reduced]
    missing = [k for k in near if not k.held]
    return [FetchPayload(k.entry) for k in missing]


def _held(state: RoundState, entry: Digest, number: int) -> RoundState:
    book = state.books.get(number, {})
    if entry not in book or book[entry].held:
        return state
    return replace(state, books={**state.books, number: {**book, entry: replace(book[entry], held=True)}})


def _trained(state: RoundState, event: TrainingDone) -> Out:
    """The node goes on; what it said is announced when it is safe."""
    at_hand = state.phase is Phase.TRAIN and event.round == state.round
    state = replace(state, train_s=event.train_s, step_s=event.train_s / max(1, event.pending.steps))
    if event.lag is not None:
        state = replace(state, ahead=ahead.measured(state.ahead, event.lag))
    if event.round <= state.final:
        return (_enter(state, Phase.FOLD, state.round) if at_hand else state), []
    state = replace(state, saving=state.saving | {event.round})
    if at_hand:
        state = _collect(state, state.collecting if in_flight(state) else state.round)
    return state, []


def _kept(state: RoundState, event: TrainingSaved) -> Out:
    """Work that ends after the node fell behind (CATCH_UP) is late, and announced all the same.

    So is work whose announcement the disk refused until the next was safe.
    """
    state = replace(state, saving=state.saving - {event.pending.round})
    if event.pending.round <= state.final:
        return state, [Discard(event.pending)]
    state, again = _announce_again(replace(state, unannounced=_others(state, event.pending.round)))
    return replace(state, unannounced=(*state.unannounced, event.pending)), [*again, Announce(event.pending)]


def _others(state: RoundState, number: int) -> tuple[Pending, ...]:
    """Unannounced work of other rounds."""
    return tuple(pending for pending in state.unannounced if pending.round != number)


def _announce_again(state: RoundState) -> Out:
    """All that the disk refused so far; what became final meanwhile is given back."""
    late = [pending for pending in state.unannounced if pending.round <= state.final]
    rest = tuple(pending for pending in state.unannounced if pending.round > state.final)
    state = replace(state, unannounced=rest, announced_at=state.now)
    return state, [*map(Discard, late), *map(Announce, rest)]


def _folded(state: RoundState, number: int, digest: Digest) -> RoundState:
    if number not in state.folding:
        return state
    folding = {at: names for at, names in state.folding.items() if at != number}
    folded = {**state.folded, number: state.folding[number]} if number > state.final else state.folded
    return replace(state, folding=folding, folded=folded, view=digest)


def _finalized(state: RoundState, number: int) -> RoundState:
    if number <= state.final:
        return state

    def rest(table: Mapping[int, object]) -> dict[int, object]:
        return {at: value for at, value in table.items() if at > number}

    changes = {
        name: rest(getattr(state, name)) for name in ("books", "folding", "folded", "acked", "reduced", "settling")
    }
    return replace(state, final=number, closed=max(state.closed, number), **changes)  # type: ignore[arg-type]


def _tick(state: RoundState) -> Out:
    late = state.now - state.announced_at >= ANNOUNCE_AGAIN_S
    if not state.unannounced or not late or not state.ready:
        return state, []
    return _announce_again(state)


# --- phases move as far as the facts allow ----------------------------------------------------------


def _leave_sync(state: RoundState) -> Out:
    """After Ready: wait for the payloads of open rounds, but not for ever; then go where the others are."""
    if state.phase is not Phase.CATCH_UP or not state.ready or state.syncing:
        return state, []
    waiting = any(not k.held for k in all_known(state))  # far rounds too: they say that finality is far ahead
    if waiting and state.now - state.since < state.config.lease_s:
        return state, []
    numbers = [*state.books, *state.saving, *(p.round for p in state.unannounced)]
    ours = [number for number in numbers if number > state.closed and worked_in(state, number)]
    if not ours:
        return _enter(state, Phase.FOLD, state.round), []
    newest = max(ours)
    if not state.config.overlap_steps:
        return _collect(replace(state, round=newest), newest), []
    first = newest - 1 if newest - 1 in ours else newest
    return _collect(replace(state, round=newest, closed=max(state.closed, first - 1)), first), []


def _train_on(state: RoundState) -> Out:
    """With overlap: the next round begins while ours is collected."""
    if not may_train_on(state):
        return state, []
    return _train(state, state.round + 1, state.round)


def _close(state: RoundState) -> Out:
    """A round closes when everybody who is expected is there, or enough are and the grace is over."""
    if state.phase is Phase.COLLECT and state.round <= state.final:
        return _enter(state, Phase.FOLD, state.round), []
    if state.phase not in _WORKING or state.collecting <= state.closed:
        return state, []
    awaited, there = attendance(state)
    reached = len(there) >= enough(len(awaited), state.config.quorum_256)
    if reached and state.quorum_at is None:
        state = replace(state, quorum_at=state.now)
    if awaited - there and state.now < closes_at(state):
        return state, []
    state = replace(state, closed=state.collecting)
    return (state if in_flight(state) else _enter(state, Phase.FOLD, state.round)), []


def _refold(state: RoundState) -> Out:
    """Fold every closed round whose set is not what the worker's view holds."""
    if not _may_fold(state):
        return state, []
    actions: list[Action] = []
    folding = dict(state.folding)
    for number in sorted(state.books):
        behind = number <= state.closed or (state.phase is Phase.FOLD and number < next_round(state))
        if not behind or number in folding:
            continue
        if number in state.reduced and number not in state.settling:
            state = replace(state, settling={**state.settling, number: True})
            actions.append(Settle(Round(number)))
        members = chosen(state.books[number].values())
        names = state.reduced.get(number, tuple(k.entry for k in members))
        if names is not None and names != state.folded.get(number, ()):
            folding[number] = names
            actions.append(FoldRound(Round(number), names))
    return replace(state, folding=folding), actions


def _after_fold(state: RoundState) -> Out:
    """Everything is folded: say what we hold, then start the next round or rest."""
    if state.folding or is_settling(state) or not _may_fold(state):
        return state, []
    state, actions = _ack(state)
    if state.phase is Phase.FOLD:
        return _go(state, actions)
    return _land(state), actions


def _may_fold(state: RoundState) -> bool:
    """With overlap the worker folds while it trains; else only between two rounds."""
    overlapped = state.config.overlap_steps > 0 and state.phase in _WORKING
    return overlapped or state.phase is Phase.FOLD or state.phase in _RESTING


def _land(state: RoundState) -> RoundState:
    """The round in flight is folded, or final: the one at hand is collected next, once it is trained."""
    if state.phase not in _WORKING or not in_flight(state) or state.collecting > state.closed:
        return state
    if state.phase is Phase.TRAIN:
        return replace(state, collecting=-1)
    return _collect(state, state.round)


def _ack(state: RoundState) -> Out:
    actions: list[Action] = []
    acked = dict(state.acked)
    for number in sorted(state.folded):
        names = state.folded[number]
        if number <= state.closed and names and acked.get(number) != names:
            acked[number] = names
            actions.append(PublishAck(Round(number), names, set_digest(list(names)), state.view))
    return replace(state, acked=acked), actions


def _go(state: RoundState, actions: list[Action]) -> Out:
    number = next_round(state)
    state = replace(state, closed=max(state.closed, number - 1))
    if number >= state.config.rounds:
        return _enter(state, Phase.DONE, state.config.rounds), actions
    if state.resting:
        return _enter(state, Phase.PAUSED, number), actions
    if number - state.final > state.config.max_open_rounds:
        return _enter(state, Phase.FULL, number), actions
    if number == 0 and not state.books and (few_members(state) or state.shortage):
        return _enter(state, Phase.GATHER, number), actions
    if worked_in(state, number):
        return _collect(replace(state, round=number), number), actions
    state, start = _train(state, number, -1)
    return state, actions + start


def _train(state: RoundState, number: int, after: int) -> Out:
    """Start round `number`, with round `after` in flight."""
    slot, slots = slot_of(state.config.me, number, state.members, int(state.config.overlap_steps > 0))
    state = _enter(replace(state, collecting=after), Phase.TRAIN, number)
    return state, [StartTraining(Round(number), slot, slots, after)]


def _collect(state: RoundState, number: int) -> RoundState:
    """Nothing to train: wait for round `number`, which is the one at hand or the one before it."""
    if state.phase is not Phase.COLLECT:
        state = replace(state, late=came_late(state, state.round))
    if number != state.collecting:
        state = replace(state, collecting=number, collecting_since=state.now, quorum_at=None)
    return replace(state, phase=Phase.COLLECT, since=state.now)


def _rest(state: RoundState) -> Out:
    """Leave GATHER, PAUSED and FULL when their reason is gone; DONE when all is final."""
    if state.phase is Phase.DONE and state.final >= state.config.rounds - 1:
        return _enter(state, Phase.FINISHED, state.round), [Finish()]
    if state.folding or is_settling(state) or state.phase not in (Phase.GATHER, Phase.PAUSED, Phase.FULL):
        return state, []
    after, _ = _go(state, [])
    if after.phase is state.phase:
        return state, []
    return _enter(state, Phase.FOLD, state.round), []  # what was skipped is folded first


def _enter(state: RoundState, phase: Phase, number: int) -> RoundState:
    if (phase, number) == (state.phase, state.round) and phase is not Phase.CATCH_UP:
        return state
    return replace(state, phase=phase, round=number, since=state.now)


def _lease(state: RoundState, actions: list[Action]) -> Out:
    lease = (_ACTIVITY[state.phase], state.round)
    if lease == state.leased:
        return state, actions
    return replace(state, leased=lease), [*actions, PublishLease(lease[0], Round(lease[1]))]


_MOVES = (
    *(_leave_sync, _refold, _train_on, _close, _refold, _after_fold, _rest),
    *(_refold, _train_on, _close, _refold, _after_fold),
)


# --- for people -----------------------------------------------------------------------------------------


def reason(state: RoundState, name: Callable[[str], str] = lambda peer: f"…{peer[-6:]}") -> str:
    """Why the node is not training right now, and what ends it; empty while it trains."""
    match state.phase:
        case Phase.SYNC:
            return "waiting for a peer to compare ledgers with"
        case Phase.CATCH_UP:
            return state.syncing or f"fetching {sum(not k.held for k in all_known(state))} payloads of open rounds"
        case Phase.GATHER:
            here = f"{len(present(state)) + 1} of {state.config.min_members} are here"
            return f"waiting for members: {here if few_members(state) else f'{state.shortage}; {MORE_ROOM}'}"
        case Phase.COLLECT:
            return _collect_reason(state, name)
        case Phase.TRAIN if must_wait(state):
            return _collect_reason(state, name)
        case Phase.FOLD:
            return "waiting for reduced slices" if is_settling(state) else "folding contributions"
        case Phase.PAUSED:
            return f"paused: {state.resting}"
        case Phase.FULL:
            open_rounds = state.round - state.final - 1
            return f"waiting for finality: {open_rounds} rounds are open; two thirds of the members must be online"
        case Phase.DONE:
            return f"all rounds trained; waiting for finality ({state.final + 1} of {state.config.rounds})"
        case Phase.FINISHED:
            return "the run is complete; serving it to others"
        case _:
            return ""


def _collect_reason(state: RoundState, name: Callable[[str], str]) -> str:
    before = f"round {state.collecting}: " if in_flight(state) else ""
    if state.collecting in state.folding:
        return before + "folding contributions"
    if state.collecting <= state.closed and is_settling(state):
        return before + "waiting for reduced slices"
    awaited, there = attendance(state)
    missing = sorted(awaited - there)
    who = ", ".join(f"{name(peer)} {_whereabouts(state, peer)}" for peer in missing[:4])
    left_s = max(0.0, closes_at(state) - state.now)
    return f"{before}waiting for {len(missing)} of {len(awaited)}: {who}; goes on in {left_s:.0f} s at the latest"


def _whereabouts(state: RoundState, peer: PeerId) -> str:
    view = state.members.get(peer)
    if peer == state.config.me:
        return "(this node: its contribution is not written yet)"
    if view is None:
        return "(gone; its payload is still wanted)"
    return f"({view.activity} round {view.round}, heard {max(0.0, state.now - view.heard):.0f} s ago)"
