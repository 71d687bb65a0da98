"""Which moments of a start are tried: spread over its progress, not over time."""

from collections.abc import Sequence
from itertools import cycle

from tests.signals.starting import Moment

ANSWERS = "call node/daemon/coordinator/driver.py:Driver.serve"
"""From here on the daemon answers on its control socket, so `atoll stop` reaches it."""
SHARES = {("daemon", "load"): 10, ("daemon", "call"): 14, ("worker", "load"): 6, ("worker", "call"): 8}
JOINS, TWICE = 6, 6
NUMBER = sum(SHARES.values()) + JOINS + TWICE


def spread(places: Sequence[str], number: int) -> list[str]:
    """So many of the places, at equal distances in their order."""
    assert len(places) >= number, f"{len(places)} places are too few for {number} moments"
    return [places[(2 * at + 1) * len(places) // (2 * number)] for at in range(number)]


def moments_of(places: dict[str, list[str]], joining: Sequence[str], link: str) -> list[Moment]:
    """All moments. `places`: of a whole start, by process; `joining`: of one with `link`, until it is built."""
    found = []
    for (role, kind), share in SHARES.items():
        mine = [place for place in places[role] if place.startswith(kind)]
        from_here_on = mine.index(ANSWERS) if ANSWERS in mine else len(mine) if role == "daemon" else 0
        hows = cycle(("SIGINT", "SIGTERM", "stop"))
        for place in spread(mine, share):
            how = next(hows)
            if how == "stop" and mine.index(place) <= from_here_on:
                how = next(hows)
            found.append(Moment(f"{role} {place}", how))
    calls = [place for place in joining if place.startswith("call")]
    found += [
        Moment(f"daemon {place}", how, link)
        for place, how in zip(spread(calls, JOINS), cycle(("SIGINT", "SIGTERM")), strict=False)
    ]
    own = [f"daemon {place}" for place in places["daemon"] if place.startswith("call")]
    its = [f"worker {place}" for place in places["worker"] if place.startswith("call")]
    return found + [Moment(place, "twice") for place in (*spread(own, TWICE // 2), *spread(its, TWICE // 2))]
