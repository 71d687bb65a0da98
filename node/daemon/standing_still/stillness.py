"""Whether a node stands still: for how long it took no step, and for how long no round became final. Pure.

The driver feeds `watch` at each tick, so the time counts whether or not somebody looks. The limits in words:
docs/standing-still.md.
"""

from statistics import median

import msgspec

from atoll.node.daemon.rounds.leaps import is_ahead
from atoll.node.daemon.rounds.queries import must_wait, waits_for_others
from atoll.node.daemon.rounds.state import STALL_ROUNDS, Phase, RoundState
from atoll.node.daemon.telemetry.round_log import TrafficTotals

FROZEN_ROUNDS = 5.0
"""A node is frozen when nothing moved for so many of its rounds and a lease; by then its wait for a member that is
gone is over."""
LEAST_S = 60.0
"""The least such time: rounds of a test take seconds. Also the time without progress of a worker that starts."""
FETCH_S = 300.0
"""The least time without a byte, of a node that receives the run's state: workers start, and peers are dialled."""
UNKNOWN_S = 1800.0
"""The least time before two rounds were trained: one step of a large model takes minutes on a slow machine."""
GAP_S = 10.0
"""A tick counts for no more: a machine that slept, or a daemon that was stopped, says nothing of the run."""
FETCHES = (Phase.SYNC, Phase.CATCH_UP)
"""The node waits for what others have."""
RESTS = (Phase.GATHER, Phase.OBSERVE, Phase.PAUSED, Phase.FINISHED)
"""Nothing needs to move."""


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """What changes in a node that gets on."""

    phase: Phase
    round: int
    """The round at hand."""
    step: int
    """Inner steps of it that are done."""
    final: int
    """Newest round in the worker's Θ_final."""
    fetched_bytes: int
    """Bytes received since the start while it waits for files, of files alone while it catches up; else 0."""
    works: bool = False
    """It catches up, and what it waits for is an answer of its worker."""
    starts: int = 0
    """Signs of progress of its worker's start; 0: none is under way, or the node waits for more than that."""


def marks_of(
    state: RoundState,
    step: int,
    final: int,
    moved: TrafficTotals,
    *,
    fetches: bool,
    works: bool = False,
    starts: int = 0,
) -> Marks:
    """The marks of a node.

    `moved`: since the start; `fetches`: it waits for files of its round; `works`: its worker has not answered a
    request; `starts`: signs of progress of its start, 0 if it was not asked to.
    """
    # Others' entries and payloads come all the time: beside a worker that hangs they are no sign that it gets on.
    works = works and state.phase is Phase.CATCH_UP
    starts = starts if state.phase in FETCHES else 0
    # Leases come from neighbours that lack the same files. Before ledgers are compared they are a sign.
    fetched = moved.blob_contents_down if state.phase is Phase.CATCH_UP else moved.down
    fetched = fetched if (fetches or state.phase in FETCHES) and not (works or starts) else 0
    return Marks(
        phase=state.phase,
        round=state.round,
        step=step,
        final=final,
        fetched_bytes=fetched,
        works=works,
        starts=starts,
    )


class Stillness(msgspec.Struct, frozen=True):
    """What `watch` remembers."""

    marks: Marks | None = None
    at_s: float = 0.0
    """When `watch` was called last, in monotonic seconds."""
    still_s: float = 0.0
    """Seconds since anything changed."""
    unfinal_s: float = 0.0
    """Seconds since a round became final, or since the node rested or received files."""


def watch(still: Stillness, marks: Marks, now: float) -> Stillness:
    """The next state, at `now` in monotonic seconds."""
    before = still.marks
    if before is None or marks.phase in RESTS:
        return Stillness(marks, now)
    passed_s = min(GAP_S, max(0.0, now - still.at_s))
    has_fetched = marks.fetched_bytes > before.fetched_bytes > 0 or marks.starts > before.starts
    return Stillness(
        marks,
        now,
        0.0 if marks != before else still.still_s + passed_s,
        0.0 if marks.final != before.final or has_fetched else still.unfinal_s + passed_s,
    )


def limit_s(state: RoundState, pace_s: float, *, works: bool = False) -> float:
    """Seconds that a node in this state may stand still.

    `pace_s`: seconds from the start of one of its rounds to that of the next; 0: not known yet.
    `works`: see Marks.
    """
    # Others may have become slower, or this node has trained no round yet: rounds that are long are not frozen.
    said_s = [view.round_s for view in state.members.values() if view.round_s > 0 and not view.untried]
    usual_s = max(pace_s, state.train_s, median(said_s) if said_s else 0.0)
    lease_s = state.config.lease_s
    if state.phase in FETCHES and not works:
        return max(FETCH_S, FROZEN_ROUNDS * usual_s + lease_s)
    if waits_ahead(state):
        return max(LEAST_S, (STALL_ROUNDS + FROZEN_ROUNDS) * usual_s + lease_s)
    if pace_s == 0.0:
        # A fast node waits in its first round for all that slow members need, by the longest rule that closes it.
        return max(UNKNOWN_S, (STALL_ROUNDS + FROZEN_ROUNDS) * usual_s + lease_s)
    return max(LEAST_S, FROZEN_ROUNDS * usual_s + lease_s)


def waits_ahead(state: RoundState) -> bool:
    """Whether it begins no round because most others are behind. That ends by itself, and takes many rounds."""
    return state.phase is Phase.JOIN and is_ahead(state, state.round)


def is_late(still: Stillness, state: RoundState, pace_s: float, *, works: bool = False) -> bool:
    """Whether no round became final for far longer than usual. See `limit_s`."""
    return pace_s > 0 and still.unfinal_s > limit_s(state, pace_s, works=works)


def hangs(still: Stillness, state: RoundState, pace_s: float, *, asked: bool, stepped: bool = True) -> bool:
    """Whether the node's own worker, which owes an answer (`asked`), got on by nothing for far longer than usual.

    Such a node folds no round, so it votes for none. `stepped`: the worker made a step since it started.
    """
    works = state.phase in (Phase.FOLD, Phase.CATCH_UP) or (state.phase is Phase.TRAIN and not must_wait(state))
    # The first step of a worker that takes the place of one that died may take minutes, whatever rounds take.
    least_s = 0.0 if stepped else FETCH_S
    return asked and works and still.still_s > max(least_s, limit_s(state, pace_s, works=True))


def frozen(still: Stillness, state: RoundState, pace_s: float, *, missing: str, why: str) -> str:
    """One line for the user of a node that stands still for far longer than usual; empty: it does not.

    `missing`: which voters it lacks and what the others do then; `why`: what it waits for. Both may be empty.
    """
    if state.phase in RESTS:
        return ""
    if still.marks is not None and still.marks.starts:
        found = f"frozen: the worker's start made no progress for {still.still_s:.0f} s"
        return f"{found}; the node ends it and starts it again" if still.still_s > LEAST_S else ""
    is_asked = still.marks is not None and still.marks.works
    longest_s = limit_s(state, pace_s, works=is_asked)
    usual = f", and a round usually takes {pace_s:.0f} s" if pace_s else ""
    if is_late(still, state, pace_s, works=is_asked):
        found = f"frozen: no round became final for {still.unfinal_s:.0f} s{usual}"
    elif still.still_s > longest_s and not waits_ahead(state):
        found = f"frozen: no step and no round for {still.still_s:.0f} s{usual}"
    else:
        return ""
    if missing:
        return f"{found}; {missing}"
    if state.phase in FETCHES and not is_asked:
        return f"{found}; {why}; `atoll doctor` looks for the cause"
    at_hand = "its worker does not answer" if is_asked else why
    if waits_ahead(state) or waits_for_others(state):
        return f"{found}; {at_hand}"  # another start would find the same
    stands = f"the next step of round {state.round} does not end"
    trains = f"it is in round {state.round}"
    at_hand = at_hand or (stands if still.still_s > longest_s else trains)
    return f"{found}; {at_hand}; if it stays so, `atoll stop --wait` and `atoll start`"
