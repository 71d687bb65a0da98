"""Members that rounds closed without: which of them are absent, and what ends that. Rule 4 of docs/rounds.md.

For who is absent a round waits one own round time. Each time that a member holds up a round in vain, its work has
to come in twice as many rounds before one waits longer for it. So a member that withholds its payloads, in any
rounds that it likes, holds up few rounds of many. One that delivers late again and again takes eight own round
times from each at most, in the mean. Pure.
"""

from collections.abc import Collection

from msgspec.structs import replace

from atoll.node.daemon.rounds.participants import quorum_of
from atoll.node.daemon.rounds.queries import book_of, idle_at, is_irregular, stalls_until
from atoll.node.daemon.rounds.state import (
    FREE_STALLS,
    STALL_ROUNDS,
    TRIAL_ROUNDS_EACH,
    Absence,
    RoundState,
    absence_s,
    stall_s,
)
from atoll.protocols.ids import PeerId

STALLED = 1.25
"""A round is held up if it waited for so many times what it waits for a member that is absent."""
MOST_ROUNDS = 64
"""The most rounds in which the work of a member that was absent has to come."""
ATTENDED = 64
"""Of so many newest closed rounds a node remembers whose work was in time."""
REMEMBERED = 1024
"""Members that held up rounds that a node remembers."""


def needed(was: Absence) -> int:
    """In how many rounds the member's work has to come until one waits for it as for others."""
    return int(min(MOST_ROUNDS, 1 << max(0, was.stalls - 1)))


def after_wait(state: RoundState, awaited: Collection[PeerId]) -> RoundState:
    """The state in which the collected round waits for these authors, too."""
    fresh = frozenset(awaited) - state.awaited
    untried = frozenset(peer for peer in fresh if (view := state.members.get(peer)) and view.untried)
    before = state.on_trial if state.awaited else frozenset()
    return replace(state, awaited=state.awaited | fresh, on_trial=before | untried)


def after_close(state: RoundState, awaited: Collection[PeerId]) -> RoundState:
    """The state in which the collected round is closed; `awaited`: whom it waited for at last."""
    number, there = state.collecting, book_of(state, state.collecting).there
    # Whoever was waited for at any time: else a lease that says "paused" just before the end would be no absence.
    ever = (state.awaited | frozenset(awaited)) - {state.config.me}
    # Where a quorum of all is there, its grace bounds the wait for the others. So it does from the moment at which
    # those that were awaited then were a quorum.
    lacks_quorum = len(there) < quorum_of(len(ever) + 1, state.config.quorum_256)
    held_up = lacks_quorum and _waited_s(state) > STALLED * absence_s(state)
    # Who owes is waited for in full again once it owes nothing: its work may never come before rounds are final.
    missing = ever - there - state.owing
    if not held_up:
        missing = frozenset(peer for peer in missing if _is_late(state, peer, awaited))
    missed = {peer: was for peer, was in state.missed.items() if was.stalls or peer in state.members}
    for peer in missing:
        was = missed.pop(peer, Absence())
        missed[peer] = Absence(was.stalls + 1, newest=number) if held_up else was
    for peer in [*missed][: max(0, len(missed) - REMEMBERED)]:
        del missed[peer]
    absent = (state.absent | missing) & missed.keys()
    waits = {at: until for at, until in state.waits.items() if at > state.final}
    if absent:
        waits[number] = stalls_until(state)
    state = replace(
        _with_shares(_with_trials(state, ever - there)),
        closed=number,
        absent=absent,
        missed=missed,
        waits=waits,
        attended=_attended(state, there),
        rounds_seen=min(ATTENDED, state.rounds_seen + 1),
    )
    for peer in there & missed.keys():
        state = _came(state, peer, number)
    return state


def _attended(state: RoundState, there: Collection[PeerId]) -> dict[PeerId, int]:
    """`RoundState.attended` with the round that closes now."""
    newest = (1 << ATTENDED) - 1
    before = state.attended
    found = {peer: (before.get(peer, 0) << 1 & newest) | (peer in there) for peer in {*before, *there}}
    # Of more than can be members those that came the least are forgotten.
    most = sorted((peer for peer, bits in found.items() if bits), key=lambda peer: -found[peer].bit_count())
    return {peer: found[peer] for peer in most[:REMEMBERED]}


def _waited_s(state: RoundState) -> float:
    """Seconds for which the collected round kept this node idle, until it had a quorum."""
    return (state.now if state.quorum_at is None else state.quorum_at) - idle_at(state)


def _charged(state: RoundState, author: PeerId) -> RoundState:
    """The state in which a member owes what the collected round waited for it."""
    # A machine that slept meanwhile waited no longer than it may.
    waited_s = min(_waited_s(state), stall_s(state, state.train_s))
    owes = state.owed_s.get(author, 0.0) + waited_s
    return replace(state, owed_s={**state.owed_s, author: owes}) if waited_s > 0 else state


def _with_shares(state: RoundState) -> RoundState:
    """The state in which each member has the time that one may take from a round."""
    # An honest slow member is late like one that lies, so both have the same: the first is in most rounds that it
    # trains. Rounds may be shorter than the way of a payload.
    share_s = STALL_ROUNDS * absence_s(state)
    owed_s = {peer: owes - share_s for peer, owes in state.owed_s.items() if owes > share_s}
    # One long wait is nothing: a start, a machine that was busy.
    once_s = stall_s(state, state.train_s)
    owing = {peer for peer, owes in owed_s.items() if owes > once_s or peer in state.owing}
    return replace(state, owed_s=owed_s, owing=frozenset(owing)) if state.owed_s else state


def _with_trials(state: RoundState, missing: Collection[PeerId]) -> RoundState:
    """The state in which what the closed round waited in vain for members on trial is lent to them."""
    # Whoever else was missing, too, and whatever came meanwhile: it is they for whom no absence shortens the wait.
    # A tick later than one round time is no long wait.
    waited_s, least_s = max(0.0, state.now - idle_at(state)), absence_s(state)
    most_s, made_up_s = STALL_ROUNDS * least_s, state.train_s / TRIAL_ROUNDS_EACH
    long_s = min(most_s, waited_s) if waited_s > STALLED * least_s else 0.0
    short_s = min(waited_s, least_s)
    if state.on_trial.isdisjoint(missing):
        lent_s, in_vain_s = state.lent_s, state.in_vain_s
    else:
        lent_s, in_vain_s = state.lent_s + long_s, state.in_vain_s + short_s
    is_stalled = any(is_irregular(state, peer) for peer in missing)
    stalled_s = state.stalled_s + (long_s if is_stalled else 0.0)
    return replace(
        state,
        lent_s=min(most_s, max(0.0, lent_s - made_up_s)),
        in_vain_s=min(most_s, max(0.0, in_vain_s - made_up_s)),
        stalled_s=min((FREE_STALLS + 1) * most_s, max(0.0, stalled_s - made_up_s)),
    )


def _is_late(state: RoundState, peer: PeerId, awaited: Collection[PeerId]) -> bool:
    """Whether a member that was not waited for in vain for long is absent all the same: it lives, and was late."""
    # One that is lost is waited for as before once it is back: it may be slow, and its start took its time.
    view = state.members.get(peer)
    return peer in awaited and view is not None and view.lost_at is None and not view.untried


def after_payload(state: RoundState, author: PeerId, number: int) -> RoundState:
    """The state after a payload of round `number` came: one that is late may show that its author works."""
    if author != state.config.me:
        state = replace(state, payload_at=state.now)
        if number == state.collecting > state.closed and author in state.awaited:
            state = _charged(state, author)
    # In time for a member that is not absent. Payloads of rounds that are not closed count when these close.
    if state.now > state.waits.get(number, state.now - 1.0):
        return state
    if number <= state.closed < number + ATTENDED:
        bits = state.attended.get(author, 0) | 1 << (state.closed - number)
        state = replace(state, attended={**state.attended, author: bits})
    return _came(state, author, number)


def _came(state: RoundState, author: PeerId, number: int) -> RoundState:
    """The state after a round to which an author contributed in time, or while one would have waited for it."""
    was = state.missed.get(author)
    if was is None or number <= was.newest:
        return state
    was = replace(was, came=was.came + 1, newest=number)
    if was.came < needed(was):
        return replace(state, missed={**state.missed, author: was})
    rest = {peer: other for peer, other in state.missed.items() if peer != author}
    missed = {**rest, author: was} if was.stalls else rest
    return replace(state, absent=state.absent - {author}, missed=missed)
