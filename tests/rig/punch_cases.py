"""Who reaches whom through home routers: punched, relayed, and how fast. Fresh nodes and mappings each time."""

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from atoll_lab.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from tests.rig.remote import OrderFailed, Remote
from tests.rig.tables import Row, spread

LINK = LinkSpec(delay_s=0.015)
"""Each end adds 15 ms each way: 60 ms between any two hosts."""
ECHO_BYTES = 1 << 20
_NUMBERS = itertools.count(1)


class Trio:
    """One public seed and two homes."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.seed, self.first, self.second = (Remote(lab[name], folder) for name in ("seed", "home1", "home2"))
        self.seed.new(0, 4001, relay=True)

    def fresh(self) -> None:
        """Give both homes new identities and ports, connected to the seed only."""
        for remote in (self.first, self.second):
            number = next(_NUMBERS)
            remote.new(number, 20_000 + number % 20_000)
        for remote in (self.first, self.second):
            remote.meet(self.seed)


@contextmanager
def trio(first: Nat, second: Nat, folder: Path) -> Iterator[Trio]:
    """Yield a trio in a lab of its own; its logs are in `folder`."""
    spec = LabSpec({"seed": Public(LINK), "home1": Home(first, LINK), "home2": Home(second, LINK)})
    with Lab(spec) as lab:
        yield Trio(lab, folder)


class Attempts(NamedTuple):
    """What was seen of fresh pairs of homes."""

    count: int
    seconds: list[float]
    """To connect, of those that did."""
    paths: Counter[str]
    """The path on both sides, of those that connected and echoed ECHO_BYTES."""
    failures: list[str]


def attempts(first: Nat, second: Nat, count: int, folder: Path) -> Attempts:
    """Connect fresh homes so many times; the echo of each is compared."""
    found = Attempts(count, [], Counter(), [])
    with trio(first, second, folder) as t:
        for _ in range(count):
            t.fresh()
            try:
                found.seconds.append(t.first.meet(t.second, within_s=30.0))
                t.first.do("say", peer=t.second.peer, size=ECHO_BYTES)
                found.paths[f"{t.first.path(t.second)}/{t.second.path(t.first)}"] += 1
            except OrderFailed as error:
                found.failures.append(str(error))
    return found


def punched(count: int, folder: Path) -> Row:
    """Measure two homes behind port-keeping routers."""
    found = attempts(Nat.CONE, Nat.CONE, count, folder)
    return judged("home–home, punchable, one public seed", "direct <= 5 s p50, >= 95 %", "punched", found)


def relayed(second: Nat, count: int, folder: Path) -> Row:
    """Measure a home that cannot be punched; 1 MiB goes there and back each time."""
    found = attempts(Nat.CONE, second, count, folder)
    return judged(f"home–home, one {second}", "relayed <= 10 s, all", "relayed", found)


def judged(case: str, bar: str, wanted: str, found: Attempts) -> Row:
    """The row of a case whose pairs should be `wanted`: punched or relayed."""
    good = found.paths[f"{wanted}/{wanted}"]
    share, limit_s, worst = (0.95, 5.0, median) if wanted == "punched" else (1.0, 10.0, max)
    holds = good > 0 and good >= share * found.count and worst(found.seconds) <= limit_s
    others = {path: seen for path, seen in found.paths.items() if path != f"{wanted}/{wanted}"}
    text = f"{good} of {found.count}, {spread(found.seconds)}"
    return Row(case, bar, " ".join([text, *(str(more) for more in (others, found.failures) if more)]), holds)
