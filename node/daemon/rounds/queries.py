"""What the facts of a RoundState say: whom it waits for and until when, where the others are, what is next.

Pure readings of the state; node/daemon/rounds/machine.py moves by them. Rules in words: docs/rounds.md.
"""

from atoll.node.daemon.rounds.participants import Known, MemberView, expected, frontier
from atoll.node.daemon.rounds.types import STALL_ROUNDS, Phase, RoundState
from atoll.protocols.ids import PeerId

MORE_ROOM = "invite more members, or set a higher `experts` in config.toml"
"""What helps where the members have no room for all experts."""


def attendance(state: RoundState) -> tuple[set[PeerId], set[PeerId]]:
    """(expected, those of them whose contribution is held) of the collected round."""
    known = state.books.get(state.collecting, {}).values()
    awaited = expected(state.config.me, state.collecting, known, state.members, state.walks)
    return awaited, {k.author for k in known if k.held} & awaited


def closes_at(state: RoundState) -> float:
    """When the collected round closes whoever is missing."""
    stall = state.collecting_since + STALL_ROUNDS * state.train_s + state.config.lease_s
    if state.quorum_at is None:
        return stall
    return min(stall, max(state.quorum_at, idle_at(state)) + state.config.grace_256 / 256 * state.train_s)


def idle_at(state: RoundState) -> float:
    """From when on the collected round keeps this node idle; its grace does not begin before.

    While the next round is trained: when the steps that may be ahead of the fold are done. As long it takes where
    no next round is trained (at the end, before a pause): with overlap members may be so far apart.
    """
    if state.phase is Phase.COLLECT and in_flight(state):
        return state.since
    return state.since + min(state.ahead.chosen * state.step_s, state.train_s)


def must_wait(state: RoundState) -> bool:
    """Are the steps done that may be ahead of the fold? By the pace of the last round; False before the first."""
    return in_flight(state) and state.step_s > 0 and state.now >= idle_at(state)


def in_flight(state: RoundState) -> bool:
    """Is a round collected behind the one at hand?"""
    return 0 <= state.collecting < state.round


def is_settling(state: RoundState) -> bool:
    """Is there a closed round of which it is not known yet what counts?"""
    return any(state.reduced.get(number, ()) is None for number in state.settling)


def next_round(state: RoundState) -> int:
    """The round to train next: the one after ours, or after the newest one that half of the others left behind."""
    first = max(state.final, state.closed) + 1
    newest = frontier(first, state.config.rounds - 1, state.books, state.members)
    while newest >= first and not _left_behind(state, newest):
        newest -= 1
    return max(first, newest + 1)


def _left_behind(state: RoundState, number: int) -> bool:
    """Is it too late to take part in round `number`? Yes when half of the others are past it, or we are in it."""
    if worked_in(state, number):
        return False
    others = present(state)
    return 2 * sum(view.round > number for view in others) >= len(others)


def came_late(state: RoundState, number: int) -> bool:
    """With overlap: had half of the others closed round `number` before our work on it was done?

    Who is one round further may still collect it; who is two rounds further has closed it.
    """
    others = present(state)
    closed = sum(view.round > number + 1 for view in others)
    return state.config.overlap_steps > 0 and closed > 0 and 2 * closed >= len(others)


def may_train_on(state: RoundState) -> bool:
    """With overlap: may the next round be trained while ours, the newest, is collected?

    All before ours is folded, and ours is in the ledger, or on its way to the disk and then there. Who came late
    closes it first, and then goes where the others are.
    """
    number, config = state.round + 1, state.config
    ours = state.phase is Phase.COLLECT and state.collecting == state.round
    said = state.round in state.saving or contributed(state, state.round)
    bounded = number < config.rounds and number - state.final <= config.max_open_rounds
    free = not (state.resting or state.folding or state.late or is_settling(state))
    return config.overlap_steps > 0 and ours and said and bounded and free and not worked_in(state, number)


def present(state: RoundState) -> list[MemberView]:
    """Members that train, or have trained all rounds."""
    return [view for view in state.members.values() if view.activity in ("training", "done")]


def untrained(state: RoundState) -> str:
    """While rounds are trained: why some experts have fewer holders than the run wants; or empty."""
    return (
        f"some experts lack holders: {state.shortage}; {MORE_ROOM}" if state.shortage and state.round > 0 else ""
    )


def few_members(state: RoundState) -> bool:
    """Are more members needed for the first round?"""
    return len(present(state)) + 1 < state.config.min_members


def contributed(state: RoundState, number: int) -> bool:
    """Is our contribution in the ledger?"""
    return any(k.author == state.config.me for k in state.books.get(number, {}).values())


def worked_in(state: RoundState, number: int) -> bool:
    """Contributed, or about to: the work is done, and its entry not seen yet."""
    if number in state.saving:
        return True
    written = all(pending.round != number for pending in state.unannounced)
    return not written or contributed(state, number)


def all_known(state: RoundState) -> list[Known]:
    """Every contribution of every open round."""
    return [known for book in state.books.values() for known in book.values()]
