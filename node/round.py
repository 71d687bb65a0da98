"""The round as a pure state machine: `step(state, event) -> (state, actions)`. Rules in words: docs/rounds.md.

No clock, no network, no randomness: events carry the time. Every event first becomes a fact of the
state; then `_settle` moves the phases as far as the facts allow.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from atoll.node.membership import Known, chosen, enough, expected, frontier, slot_of
from atoll.node.round_words import (
    STALL_ROUNDS,
    Action,
    Announce,
    Behind,
    ContributionSeen,
    Discard,
    Event,
    FetchPayload,
    Finalized,
    Finish,
    Folded,
    FoldRound,
    LeasesChanged,
    Pause,
    PayloadHeld,
    Phase,
    PublishAck,
    PublishLease,
    Ready,
    Resume,
    RoundConfig,
    RoundState,
    StartTraining,
    Tick,
    Trained,
)
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.records import set_digest
from atoll.protocols.registers import Activity

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

Out = tuple[RoundState, list[Action]]


def begin(config: RoundConfig) -> RoundState:
    """The state of a node that has just started."""
    return RoundState(config)


def step(state: RoundState, event: Event) -> Out:
    """Next state, and what to do about it."""
    state, actions = _take(replace(state, now=max(state.now, event.now)), event)
    for move in (_leave_sync, _close, _refold, _after_fold, _rest, _refold, _after_fold):
        state, more = move(state)
        actions += more
    return _lease(state, actions)


# --- events become facts ------------------------------------------------------------------------


def _take(state: RoundState, event: Event) -> Out:
    match event:
        case Ready():
            return _ready(state, event)
        case ContributionSeen():
            return _seen(state, event)
        case PayloadHeld(payload):
            return _held(state, payload), []
        case LeasesChanged(members):
            return replace(state, members=dict(members)), []
        case Trained():
            return _trained(state, event)
        case Folded(number, digest):
            return _folded(state, number, digest), []
        case Finalized(number):
            after = _finalized(state, number)
            return after, _wanted(after, newest=state.final + state.config.max_open_rounds)
        case Pause(reason):
            return replace(state, resting=reason), []
        case Resume():
            return replace(state, resting=""), []
        case Behind(reason):
            return _enter(replace(state, syncing=reason, folding={}), Phase.CATCH_UP, state.round), []
        case Tick():
            return _tick(state)


def _ready(state: RoundState, event: Ready) -> Out:
    state = _finalized(state, Round(event.final)) if event.final > state.final else state
    actions: list[Action] = []
    for pending in event.pending:
        if pending.round <= state.final:
            actions.append(Discard(pending))
        elif not _contributed(state, pending.round):
            actions.append(Announce(pending))
            state = replace(state, unannounced=pending)
    state = replace(state, folding={}, folded={}, syncing="", ready=True)
    actions += _wanted(state, newest=-1)
    return _enter(state, Phase.CATCH_UP, state.round), actions


def _seen(state: RoundState, event: ContributionSeen) -> Out:
    body = event.contribution
    if body.round <= state.final or body.round >= state.config.rounds:
        return state, []
    book = dict(state.books.get(body.round, {}))
    if event.entry in book:
        return state, []
    known = Known(event.entry, event.author, body.round, body.weight, body.payload, event.held)
    book[event.entry] = known
    state = replace(state, books={**state.books, body.round: book})
    if event.author == state.config.me and state.unannounced and state.unannounced.round == body.round:
        state = replace(state, unannounced=None)
    near = body.round <= state.final + state.config.max_open_rounds
    if event.held or not state.ready or not near:
        return state, []
    return state, [FetchPayload(body.payload, event.author, body.round)]


def _wanted(state: RoundState, newest: int) -> list[Action]:
    """What is missing of the rounds above `newest` that may be open: disk is bounded by the open window."""
    if not state.ready:
        return []
    last = state.final + state.config.max_open_rounds
    missing = [k for k in _all(state) if not k.held and newest < k.round <= last]
    return [FetchPayload(k.payload, k.author, k.round) for k in missing]


def _held(state: RoundState, payload: Digest) -> RoundState:
    books = dict(state.books)
    for number, book in state.books.items():
        news = {entry: replace(k, held=True) for entry, k in book.items() if k.payload == payload and not k.held}
        if news:
            books[number] = {**book, **news}
    return replace(state, books=books)


def _trained(state: RoundState, event: Trained) -> Out:
    """Work that ends after the node fell behind (CATCH_UP) is late, and announced all the same."""
    at_hand = state.phase is Phase.TRAIN and event.round == state.round
    state = replace(state, train_s=event.train_s)
    if event.round <= state.final:
        return (_enter(state, Phase.FOLD, state.round) if at_hand else state), [Discard(event.pending)]
    state = replace(state, unannounced=event.pending, announced_at=state.now)
    if at_hand:
        state = _enter(replace(state, quorum_at=None), Phase.COLLECT, state.round)
    return state, [Announce(event.pending)]


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

    changes = {name: rest(getattr(state, name)) for name in ("books", "folding", "folded", "acked")}
    return replace(state, final=number, closed=max(state.closed, number), **changes)  # type: ignore[arg-type]


def _tick(state: RoundState) -> Out:
    late = state.now - state.announced_at >= ANNOUNCE_AGAIN_S
    if state.unannounced is None or not late or not state.ready:
        return state, []
    if state.unannounced.round <= state.final:
        return replace(state, unannounced=None), [Discard(state.unannounced)]
    return replace(state, announced_at=state.now), [Announce(state.unannounced)]


# --- phases move as far as the facts allow ----------------------------------------------------------


def _leave_sync(state: RoundState) -> Out:
    """After Ready: wait for the payloads of open rounds, but not for ever; then go where the others are."""
    if state.phase is not Phase.CATCH_UP or not state.ready or state.syncing:
        return state, []
    waiting = any(not k.held for k in _all(state))  # far rounds too: they say that finality is far ahead
    if waiting and state.now - state.since < state.config.lease_s:
        return state, []
    numbers = [*state.books, *([state.unannounced.round] if state.unannounced else [])]
    ours = [number for number in numbers if number > state.closed and _worked_in(state, number)]
    if ours:
        return _enter(replace(state, quorum_at=None), Phase.COLLECT, max(ours)), []
    return _enter(state, Phase.FOLD, state.round), []


def _close(state: RoundState) -> Out:
    """COLLECT ends when everybody who is expected is there, or enough are and the grace is over."""
    if state.phase is not Phase.COLLECT:
        return state, []
    if state.round <= state.final:
        return _enter(state, Phase.FOLD, state.round), []
    awaited, there = _attendance(state)
    reached = len(there) >= enough(len(awaited), state.config.quorum_256)
    if reached and state.quorum_at is None:
        state = replace(state, quorum_at=state.now)
    if not awaited - there or state.now >= _closes_at(state):
        return _enter(replace(state, closed=max(state.closed, state.round)), Phase.FOLD, state.round), []
    return state, []


def _closes_at(state: RoundState) -> float:
    """When the round closes whoever is missing."""
    stall = state.since + STALL_ROUNDS * state.train_s + state.config.lease_s
    if state.quorum_at is None:
        return stall
    return min(stall, state.quorum_at + state.config.grace_256 / 256 * state.train_s)


def _refold(state: RoundState) -> Out:
    """Fold every closed round whose set is not what the worker's view holds."""
    if state.phase is not Phase.FOLD and state.phase not in _RESTING:
        return state, []
    actions: list[Action] = []
    folding = dict(state.folding)
    for number in sorted(state.books):
        members = chosen(state.books[number].values())
        names = tuple(k.entry for k in members)
        asked = folding.get(number, state.folded.get(number, ()))
        behind = number <= state.closed or (state.phase is Phase.FOLD and number < _next(state))
        if behind and names != asked and number not in folding:
            folding[number] = names
            actions.append(FoldRound(Round(number), members))
    return replace(state, folding=folding), actions


def _after_fold(state: RoundState) -> Out:
    """Everything is folded: say what we hold, then start the next round or rest."""
    if state.folding or (state.phase is not Phase.FOLD and state.phase not in _RESTING):
        return state, []
    state, actions = _ack(state)
    if state.phase is not Phase.FOLD:
        return state, actions
    return _go(state, actions)


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
    number = _next(state)
    state = replace(state, closed=max(state.closed, number - 1))
    if number >= state.config.rounds:
        return _enter(state, Phase.DONE, state.config.rounds), actions
    if state.resting:
        return _enter(state, Phase.PAUSED, number), actions
    if number - state.final > state.config.max_open_rounds:
        return _enter(state, Phase.FULL, number), actions
    if number == 0 and not state.books and len(_present(state)) + 1 < state.config.min_members:
        return _enter(state, Phase.GATHER, number), actions
    if _worked_in(state, number):
        return _enter(replace(state, quorum_at=None), Phase.COLLECT, number), actions
    slot, slots = slot_of(state.config.me, number, state.members)
    return _enter(state, Phase.TRAIN, number), [*actions, StartTraining(Round(number), slot, slots)]


def _rest(state: RoundState) -> Out:
    """Leave GATHER, PAUSED and FULL when their reason is gone; DONE when all is final."""
    if state.phase is Phase.DONE and state.final >= state.config.rounds - 1:
        return _enter(state, Phase.FINISHED, state.round), [Finish()]
    if state.folding or state.phase not in (Phase.GATHER, Phase.PAUSED, Phase.FULL):
        return state, []
    after, _ = _go(state, [])
    if after.phase is state.phase:
        return state, []
    return _enter(state, Phase.FOLD, state.round), []  # what was skipped is folded first


# --- what the facts say -------------------------------------------------------------------------------


def _next(state: RoundState) -> int:
    """The round to train next: the one after ours, or after the newest one that half of the others left behind."""
    first = max(state.final, state.closed) + 1
    newest = frontier(first, state.config.rounds - 1, state.books, state.members)
    while newest >= first and not _left_behind(state, newest):
        newest -= 1
    return max(first, newest + 1)


def _left_behind(state: RoundState, number: int) -> bool:
    """Is it too late to take part in round `number`? Yes when half of the others are past it, or we are in it."""
    if _worked_in(state, number):
        return False
    others = [view for view in state.members.values() if view.activity in ("training", "done")]
    return 2 * sum(view.round > number for view in others) >= len(others)


def _attendance(state: RoundState) -> tuple[set[PeerId], set[PeerId]]:
    """(expected, those of them whose contribution is held) of the round at hand."""
    known = state.books.get(state.round, {}).values()
    awaited = expected(state.config.me, state.round, known, state.members)
    return awaited, {k.author for k in known if k.held} & awaited


def _present(state: RoundState) -> list[PeerId]:
    return [peer for peer, view in state.members.items() if view.activity in ("training", "done")]


def _contributed(state: RoundState, number: int) -> bool:
    return any(k.author == state.config.me for k in state.books.get(number, {}).values())


def _worked_in(state: RoundState, number: int) -> bool:
    """Contributed, or about to: the work is saved, and its entry not seen yet."""
    written = state.unannounced is None or state.unannounced.round != number
    return not written or _contributed(state, number)


def _all(state: RoundState) -> list[Known]:
    return [known for book in state.books.values() for known in book.values()]


def _enter(state: RoundState, phase: Phase, number: int) -> RoundState:
    if (phase, number) == (state.phase, state.round) and phase is not Phase.CATCH_UP:
        return state
    return replace(state, phase=phase, round=number, since=state.now)


def _lease(state: RoundState, actions: list[Action]) -> Out:
    lease = (_ACTIVITY[state.phase], state.round)
    if lease == state.leased:
        return state, actions
    return replace(state, leased=lease), [*actions, PublishLease(lease[0], Round(lease[1]))]


# --- for people -----------------------------------------------------------------------------------------


def reason(state: RoundState, name: Callable[[str], str] = lambda peer: f"…{peer[-6:]}") -> str:
    """Why the node is not training right now, and what ends it; empty while it trains."""
    match state.phase:
        case Phase.SYNC:
            return "waiting for a peer to compare ledgers with"
        case Phase.CATCH_UP:
            return state.syncing or f"fetching {sum(not k.held for k in _all(state))} payloads of open rounds"
        case Phase.GATHER:
            return f"waiting for members: {len(_present(state)) + 1} of {state.config.min_members} are here"
        case Phase.COLLECT:
            return _collect_reason(state, name)
        case Phase.FOLD:
            return "folding contributions"
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
    awaited, there = _attendance(state)
    missing = sorted(awaited - there)
    who = ", ".join(f"{name(peer)} {_whereabouts(state, peer)}" for peer in missing[:4])
    left_s = max(0.0, _closes_at(state) - state.now)
    return f"waiting for {len(missing)} of {len(awaited)}: {who}; goes on in {left_s:.0f} s at the latest"


def _whereabouts(state: RoundState, peer: PeerId) -> str:
    view = state.members.get(peer)
    if peer == state.config.me:
        return "(this node: its contribution is not written yet)"
    if view is None:
        return "(gone; its payload is still wanted)"
    return f"({view.activity} round {view.round}, heard {max(0.0, state.now - view.heard):.0f} s ago)"
