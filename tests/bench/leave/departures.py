"""Which members leave in a `bench leave`, and what it cost. Pure."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from atoll_bench.report import Bar, Row, row

STOP_LIMIT, KILL_LIMIT = Bar("<=", 2.0), Bar("<=", 3.0)
"""The next final round, in own round times: after the last leaver ended, or its lease where no quorum is left."""

Way = Literal["stop", "kill"]


class Departure(NamedTuple):
    """`gone` of `members` leave at once."""

    members: int
    gone: int


class Cost(NamedTuple):
    """What one departure cost."""

    departure: Departure
    way: Way
    round_s: float
    """A usual round before it."""
    took_s: float
    """From the end of the last leaver until a round is final that was not when it ended."""
    trained: int
    """Rounds that the others began meanwhile."""


def chains(members: int) -> Iterator[list[Departure]]:
    """Every k of n = 2 … `members`, in few swarms: who leaves in one departure is gone in the next."""
    left = {(n, gone) for n in range(2, members + 1) for gone in range(1, n)}
    while left:
        number, chain = max(n for n, _ in left), []
        while gone := min((gone for n, gone in left if n == number), default=0):
            left.remove((number, gone))
            chain.append(Departure(number, gone))
            number -= gone
        yield chain


def row_of(departure: Departure, way: Way, cost: Cost | None) -> Row:
    """A row of the table; without a value where the departure was not played."""
    return row(
        f"{departure.gone} of {departure.members} {'stop' if way == 'stop' else 'killed'}",
        None if cost is None else cost.took_s / cost.round_s,
        "round times",
        STOP_LIMIT if way == "stop" else KILL_LIMIT,
        note="" if cost is None else f"round {cost.round_s:.2f} s, {cost.trained} rounds begun meanwhile",
    )
