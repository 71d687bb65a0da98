"""Where the others are: over which rounds a node leaps, and when one that is ahead waits. Pure.

A node leaps to where at least half of all members are, itself among them. Who is ahead with fewer waits for the
others: so a few members that run ahead pull nobody over rounds, which would be decided with their work alone, and
after a cut no side stays ahead of the other one. Rules in words: docs/rounds.md.
"""

from statistics import median

from atoll.node.daemon.rounds.participants import MemberView, frontier
from atoll.node.daemon.rounds.state import STALL_ROUNDS, RoundState
from atoll.protocols.ids import PeerId

FAR_IN = 0.5
"""A member did most of a round after this share of the time that it says it needs."""


def counted_others(state: RoundState) -> dict[PeerId, MemberView]:
    """Leases of the others that say where the run is: they train, or trained all rounds, and showed work."""
    # Who came too late to the end goes to the end. Keys without work cost nothing, so they are nowhere.
    shown = {
        peer: view
        for peer, view in state.members.items()
        if view.activity in ("training", "done") and not view.untried
    }
    # In a run with probation legal noise is no work yet: who decides says where the run is, if one is here.
    return {peer: shown[peer] for peer in shown.keys() & state.set_rules.order.voters} or shown


def are_at_least_half(count: int, others: int) -> bool:
    """Whether `count` of the `others` are at least half of all members, this node included."""
    return 2 * count > others


def newest_left(state: RoundState, first: int) -> int:
    """The newest round from `first` on for which this node comes too late, by half of all; else first - 1."""
    others = counted_others(state)
    newest = frontier(first, state.config.rounds - 1, state.books, others.keys())
    # While the others still collect a round it is not too late to take part in it, even if half contributed
    # already.
    while newest >= first and not _are_past(others, newest):
        newest -= 1
    return newest + _leaves_soon(state, others, newest + 1)


def _are_past(others: dict[PeerId, MemberView], number: int) -> bool:
    """Whether at least half are past round `number`, so that work on it would come too late."""
    return are_at_least_half(sum(view.round > number for view in others.values()), len(others))


def _leaves_soon(state: RoundState, others: dict[PeerId, MemberView], number: int) -> bool:
    """With overlap: whether at least half left round `number` with their work, or did most of it."""
    if not state.config.overlap_steps or number not in state.books:
        return False
    left = {peer for peer in state.books[number].there & others.keys() if others[peer].round > number}
    # Two members that are equally fast cannot both see the other one so far, whatever a third one says.
    far = {
        peer
        for peer, view in others.items()
        if (view.activity, view.round) == ("training", number)
        and state.now - state.entered.get(peer, state.now) > FAR_IN * view.round_s > 0
    }
    return bool(left) and are_at_least_half(len(left | far), len(others))


def came_late(state: RoundState, number: int) -> bool:
    """With overlap: whether half of all went over the round after `number` before our work on `number` was done.

    Then this node folds before it trains on, and goes where they are. A member one round further may still collect
    `number`.
    """
    return state.config.overlap_steps > 0 and newest_left(state, number + 1) > number


def is_ahead(state: RoundState, number: int) -> bool:
    """Whether this node waits before it begins round `number`, because most members are further behind."""
    return bool(_behind(state, number))


def _behind(state: RoundState, number: int) -> list[MemberView]:
    """The members that train a round before the one before `number`, if they are most of all; else none."""
    # Where work may be of an older base members need not be together.
    if state.config.most_age:
        return []
    others = counted_others(state)
    # Of a member whose connection is lost nobody knows whether it goes on: it may be killed.
    behind = {
        peer: view
        for peer, view in others.items()
        if view.activity == "training" and view.round < number - 1 and view.lost_at is None
    }
    if 2 * len(behind) <= len(others) + 1:
        return []
    # As long as they go on, however many rounds they are behind; who stands still is no longer waited for than in
    # a round.
    took_s = max(state.train_s, median(view.round_s for view in behind.values()))
    patience_s = STALL_ROUNDS * took_s + state.config.lease_s
    moves = any(state.now < state.entered.get(peer, 0.0) + patience_s for peer in behind)
    return [*behind.values()] if moves else []


def why_ahead(state: RoundState) -> str:
    """Why a node that is ahead waits, in one line; empty if it does not."""
    behind = _behind(state, state.round)
    newest = max((view.round for view in behind), default=0)
    return f"waiting for {len(behind)} members that are in round {newest} or before" if behind else ""
