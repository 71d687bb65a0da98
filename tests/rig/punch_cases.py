"""Who reaches whom through home routers: punched, relayed, and how fast. Fresh nodes and mappings each time."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from atoll_lab.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from tests.rig.remote import OrderFailed, Remote
from tests.rig.tables import Row, spread

LINK = LinkSpec(delay_s=0.015)
"""Each end adds 15 ms each way: 60 ms between any two hosts."""
ECHO_BYTES = 1 << 20
_NUMBERS = itertools.count(1)


class Trio:
    """One public seed and two homes."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.seed, self.first, self.second = (Remote(lab[name]) for name in ("seed", "home1", "home2"))
        self.seed.new(0, 4001, relay=True)

    def fresh(self) -> None:
        """Give both homes new identities and ports, connected to the seed only."""
        for remote in (self.first, self.second):
            number = next(_NUMBERS)
            remote.new(number, 20_000 + number % 20_000)
        for remote in (self.first, self.second):
            remote.meet(self.seed)


@contextmanager
def trio(first: Nat, second: Nat) -> Iterator[Trio]:
    """Yield a trio in a lab of its own."""
    spec = LabSpec({"seed": Public(LINK), "home1": Home(first, LINK), "home2": Home(second, LINK)})
    with Lab(spec) as lab:
        yield Trio(lab)


def attempts(first: Nat, second: Nat, count: int) -> tuple[list[float], dict[str, int], list[str]]:
    """Return the seconds to connect, the count of each path on both sides, and the failures."""
    seconds: list[float] = []
    paths: dict[str, int] = {}
    failures: list[str] = []
    with trio(first, second) as t:
        for _ in range(count):
            t.fresh()
            try:
                seconds.append(t.first.meet(t.second, within_s=30.0))
                t.first.do("say", peer=t.second.peer, size=ECHO_BYTES)
                path = f"{t.first.path(t.second)}/{t.second.path(t.first)}"
                paths[path] = paths.get(path, 0) + 1
            except OrderFailed as error:
                failures.append(str(error))
    return seconds, paths, failures


def punched(count: int) -> Row:
    """Measure two homes behind port-keeping routers."""
    seconds, paths, failures = attempts(Nat.CONE, Nat.CONE, count)
    good = paths.get("punched/punched", 0)
    holds = good >= 0.95 * count and sorted(seconds)[len(seconds) // 2] <= 5.0
    text = f"{good} of {count}, {spread(seconds)} {failures or ''}"
    return Row("home–home, punchable, one public seed", "direct <= 5 s p50, >= 95 of 100", text, holds)


def relayed(second: Nat, count: int) -> Row:
    """Measure a home that cannot be punched; 1 MiB goes there and back each time."""
    seconds, paths, failures = attempts(Nat.CONE, second, count)
    good = paths.get("relayed/relayed", 0)
    holds = good == count and max(seconds) <= 10.0
    text = f"{good} of {count}, {spread(seconds)} {failures or ''}"
    return Row(f"home–home, one {second}", "relayed <= 10 s, 100 of 100", text, holds)
