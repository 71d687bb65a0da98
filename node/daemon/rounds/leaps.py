"""Where the others are: over which rounds a node leaps, and when one that is ahead waits. Pure.

A node leaps to where at least half of all members are, itself among them. Who is ahead with fewer waits for the
others: so a few members that run ahead pull nobody over rounds, which would be decided with their work alone, and
after a cut no side stays ahead of the other one. Rules in words: docs/rounds.md.
"""

from atoll.node.daemon.rounds.participants import MemberView, are_at_least_half, frontier
from atoll.node.daemon.rounds.state import RoundState, stall_s
from atoll.protocols.ids import PeerId

FAR_IN = 0.5
"""A member did most of a round after this share of the time that it says it needs."""
SHOWN = 4
"""Members that a line names at most."""


def counted_others(state: RoundState, *, with_starting: bool) -> dict[PeerId, MemberView]:
    """Leases of the others that say where the run is: they train or trained all rounds, and showed work.

    `with_starting`: those that catch up, or wait for others, are counted, too.
    """
    # Who came too late to the end goes to the end. Keys without work cost nothing, so they are nowhere.
    activities = ("training", "done", "syncing") if with_starting else ("training", "done")
    shown = {
        peer: view for peer, view in state.members.items() if view.activity in activities and not view.untried
    }
    # In a run with probation legal noise is no work yet: who decides says where the run is, if one is here.
    return {peer: shown[peer] for peer in shown.keys() & state.set_rules.order.voters} or shown


def members_at_work(state: RoundState) -> dict[PeerId, MemberView]:
    """The members that train, whose speeds set the pace.

    A lease costs nothing: in a run that has a final round who shows no work is none of them.
    """
    members = counted_others(state, with_starting=False) if state.final >= 0 else state.members
    return {peer: view for peer, view in members.items() if view.activity == "training"}


def holders_at_work(state: RoundState) -> dict[PeerId, MemberView]:
    """The members whose experts this node need not train, if they train: at work, or on trial and in its round."""
    # A newcomer gets the experts' moments from who gives them up; a key whose lease stands still holds none.
    fresh = {peer: view for peer, view in state.members.items() if view.untried and view.round >= state.round - 1}
    return members_at_work(state) | fresh


def newest_left(state: RoundState, first: int) -> int:
    """The newest round from `first` on for which this node comes too late, by half of all; else first - 1."""
    # After a start a node goes to those that train, and waits for nobody else that starts. Later it is not pulled
    # over rounds by a few because the others have ended and start again.
    others = counted_others(state, with_starting=state.train_s > 0)
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
    return bool(_behind(state, number)[0])


def _behind(state: RoundState, number: int) -> tuple[dict[PeerId, MemberView], int]:
    """The members that train a round before the one before `number`, if they are most of all; else none.

    Also how many of these must come, or be given up, until the others are no longer most of all.
    """
    # Where work may be of an older base members need not be together.
    if state.config.most_age:
        return {}, 0
    # Whoever waits like this node is counted: else all could wait for a few, and see only these.
    others = counted_others(state, with_starting=True)
    behind = {
        peer: view
        for peer, view in others.items()
        if view.activity == "training" and view.round < number - 1 and _goes_on(state, peer, view)
    }
    too_many = len(behind) - (len(others) + 1) // 2
    return (behind, too_many) if too_many > 0 else ({}, 0)


def _goes_on(state: RoundState, peer: PeerId, view: MemberView) -> bool:
    """Whether a member may be waited for: it began its round not too long ago, and work of others comes."""
    # Of one whose connection is lost nobody knows whether it goes on: it may be killed.
    is_here = view.lost_at is None and state.now < _given_up_at(state, peer, view)
    return is_here and state.now < state.payload_at + stall_s(state, state.train_s)


def _given_up_at(state: RoundState, peer: PeerId, view: MemberView) -> float:
    """When a member behind is waited for no more, if it begins no other round."""
    # By its own pace: so a slow one has its time, and what one says keeps nobody waiting for another one.
    return state.entered.get(peer, 0.0) + stall_s(state, max(state.train_s, view.round_s))


def ahead_s(state: RoundState) -> float | None:
    """Seconds until as many as are needed of those behind are there, by the pace that they say; None: unknown."""
    behind, needed = _behind(state, state.round)
    paced = {peer: view for peer, view in behind.items() if view.round_s > 0 and peer in state.entered}
    due_s = sorted(
        state.entered[peer] + (state.round - 1 - view.round) * view.round_s - state.now
        for peer, view in paced.items()
    )
    return due_s[needed - 1] if 0 < needed <= len(due_s) and due_s[needed - 1] > 0 else None


def why_ahead(state: RoundState) -> str:
    """Why a node that is ahead waits: for whom, and for how long if they stand still. Empty if it does not."""
    behind, needed = _behind(state, state.round)
    if not behind:
        return ""
    left_s = sorted(_given_up_at(state, peer, view) - state.now for peer, view in behind.items())[needed - 1]
    who = ", ".join(whereabouts(state, peer) for peer in sorted(behind)[:SHOWN])
    return f"waiting for {len(behind)} members behind: {who}; at most {left_s:.0f} s if they begin no round"


def whereabouts(state: RoundState, peer: PeerId) -> str:
    """A member's short name, what it does and in which round, and when it was heard."""
    name, view = f"…{peer[-6:]}", state.members.get(peer)
    if peer == state.config.me:
        return f"{name} (this node: its contribution is not written yet)"
    if view is None:
        return f"{name} (gone; its payload is still wanted)"
    lost = "" if view.lost_at is None else ", connection lost"
    return f"{name} ({view.activity} round {view.round}, heard {max(0.0, state.now - view.heard):.0f} s ago{lost})"
