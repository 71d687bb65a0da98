"""Whole nodes that train behind home routers: what they lose when relays, seeds, ports and addresses go away.

Two public nodes relay; home1 and home3 are behind port-keeping routers, home2 behind a symmetric one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from atoll_lab.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from atoll_lab.namespaces import LabError
from atoll_lab.node import LabNode, until
from tests.rig.tables import Row

LINK = LinkSpec(delay_s=0.015)
RUN = ("outer.rounds=4000", "outer.stages=[[0,60]]", "inner.batch=2", "pace.lease_s=20", "pace.min_members=2")
HOMES = ("home1", "home2", "home3")
JOIN_S = 300.0
SETTLE_S = 15.0
"""After this time without a break, what was done to a router did not hurt."""
BAR_S = 15.0
ROUNDS_AFTER = 2
"""Final rounds that are looked at beside those that were open when something was done to a router."""


class Town:
    """The nodes of one case, all in one run."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.nodes = {host.name: LabNode(host, folder) for host in lab}
        self.run_file = folder / "town.run"
        self.known_s: dict[str, float] = {}
        """Seconds from a home's start to its first word on how it is reached."""

    def __getitem__(self, name: str) -> LabNode:
        return self.nodes[name]

    def start(self) -> None:
        """Start the nodes, public ones first; every home knows only `seed`."""
        seed = self["seed"]
        flags = [part for change in RUN for part in ("--set", change)]
        seed.atoll("run", "new", "town", "--preset", "tiny", "--seed", "1", *flags, "--data", "synthetic:markov")
        self.run_file.write_bytes(seed.home.run_file("town").read_bytes())
        seed.start(self.run_file, "--relay")
        self["other"].start(self.run_file, "--relay", seeds=[seed.seed()])
        for name in HOMES:
            began = time.monotonic()
            self[name].start(self.run_file, seeds=[seed.seed()])
            until(f"{name} knows its reach", lambda name=name: self.reach(name) != "unknown", JOIN_S)
            self.known_s[name] = time.monotonic() - began

    def reach(self, name: str) -> str:
        """Return a node's own reachability."""
        return str(self[name].status().get("reachability", "unknown"))

    def path(self, a: str, b: str) -> str:
        """Return how two nodes are connected; empty unless both report it."""
        there, back = self[a].path_to(self[b]), self[b].path_to(self[a])
        return there if there and back else ""

    def works(self, a: str, b: str) -> bool:
        """Whether two nodes are connected and answer each other's pings."""
        return bool(self.path(a, b)) and self[a].answers_ping(self[b]) and self[b].answers_ping(self[a])

    def lost(self, author: str, witness: str, first: int, last: int) -> list[int]:
        """Return the rounds from `first` to `last` whose final set lacks the author's work. Raises LabError."""
        until(f"round {last} is final", lambda: self[witness].status().get("final", -1) >= last, JOIN_S)
        final: dict[int, list[str]] = {}

        def are_known() -> bool:
            rows = self[witness].rounds()
            final.update({row["round"]: row["contributors"] for row in rows if row["final"]})
            return final.keys() >= set(range(first, last + 1))

        until(f"{witness} knows the rounds {first} to {last}", are_known, JOIN_S)
        return [number for number in range(first, last + 1) if self[author].peer not in final[number]]


@contextmanager
def town(folder: Path) -> Iterator[Town]:
    """Yield a town in a lab of its own, with all nodes training and their homes in `folder`."""
    kinds = {"home1": Nat.CONE, "home2": Nat.SYMMETRIC, "home3": Nat.CONE}
    hosts = {"seed": Public(LINK), "other": Public(LINK), **{n: Home(k, LINK) for n, k in kinds.items()}}
    with Lab(LabSpec(hosts)) as lab:
        found = Town(lab, folder)
        found.start()
        yield found


def meet(t: Town) -> list[Row]:
    """Wait until all nodes are connected over the paths that they should have."""
    wanted = {("home1", "home3"): "punched", ("home1", "home2"): "relayed", ("home2", "home3"): "relayed"}
    rows = []
    for (a, b), path in wanted.items():
        took_s = until(f"{a} and {b} are {path}", lambda a=a, b=b, path=path: t.path(a, b) == path, JOIN_S)
        found = t.path(a, b)
        rows.append(Row(f"nodes {a}–{b}", path, f"{found} {took_s:.1f} s after the last start", found == path))
    latest_s = max(t.known_s.values())
    found = ", ".join(f"{name} {t.reach(name)}" for name in ("seed", *HOMES))
    rows.append(Row("reach known after the start", "<= 10 s", f"{latest_s:.1f} s; {found}", latest_s <= 10.0))
    final = t["home1"].answered()["final"]
    until("rounds are final", lambda: t["home1"].status().get("final", -1) >= final + 2, JOIN_S)
    return rows


class Recovery(NamedTuple):
    """What something that was done to a router cost."""

    took_s: float | None
    """From then until the pair works again; None: it never broke."""
    lost: list[int]
    """Rounds whose final set lacks home1's work, of those that were open then and ROUNDS_AFTER more."""
    looked_at: int
    """How many rounds those are."""

    def row(self, case: str) -> Row:
        """The row of the case."""
        time_text = "did not break" if self.took_s is None else f"{self.took_s:.1f} s"
        text = f"{time_text}, {len(self.lost)} of {self.looked_at} rounds without home1"
        holds = (self.took_s is None or self.took_s <= BAR_S) and not self.lost
        return Row(case, "<= 15 s, no lost round", text, holds)


def after(t: Town, pair: tuple[str, str], hurt: Callable[[], object]) -> Recovery:
    """Return what it costs to `hurt` the router of home1, the rounds that were open then included."""
    before = t["home3"].answered()
    began = time.monotonic()
    hurt()
    took_s = None
    try:
        until("the connection breaks", lambda: not t.works(*pair), SETTLE_S)
    except LabError:
        pass
    else:
        until("the connection is back", lambda: t.works(*pair), 4 * BAR_S)
        took_s = time.monotonic() - began
    first, last = before["final"] + 1, t["home3"].answered()["round"] + ROUNDS_AFTER
    return Recovery(took_s, t.lost("home1", "home3", first, last), last - first + 1)


def routers(t: Town) -> list[Row]:
    """A router forgets its mappings, one changes ports, one gets another address."""
    router = t.lab.router("home1")
    hurts: dict[str, Callable[[], object]] = {
        "conntrack flush": router.flush_conntrack,
        "NAT rebind, other ports": router.rebind,
        "address change": router.change_address,
    }
    return [after(t, ("home1", "home3"), hurt).row(name) for name, hurt in hurts.items()]


def relay_killed(t: Town) -> Row:
    """The relay between home1 and home2 dies while it relays."""
    via = t["home1"].maddr_of(t["home2"])
    name = next(name for name in ("seed", "other") if t[name].peer in via)
    t[name].kill()
    began = time.monotonic()
    until("they hear each other again", lambda: _by_another(t, t[name].peer), 4 * BAR_S)
    took_s = time.monotonic() - began
    return Row("relay killed while relaying", "<= 15 s", f"{took_s:.1f} s ({name} killed)", took_s <= BAR_S)


def _by_another(t: Town, dead: str) -> bool:
    return t.works("home1", "home2") and dead not in t["home1"].maddr_of(t["home2"])


def from_cache(t: Town, count: int) -> Row:
    """A seed that is gone; home3 stops and starts again, and has only its cache."""
    dead, alive = ("other", "seed") if not t["other"].status() else ("seed", "other")
    if t[dead].status():
        t[dead].kill()
    seconds = []
    for _ in range(count):
        t["home3"].stop()
        t["home3"].start(t.run_file, seeds=[t[dead].seed()])
        try:
            seconds.append(until("it is back", lambda: t.works("home3", alive), 60.0))
        except LabError:
            continue
    text = f"{len(seconds)} of {count}, worst {max(seconds, default=0.0):.1f} s after start"
    return Row("dead seed, joined from the cache", "100 %", text, len(seconds) == count)


def all_rows(rejoins: int, folder: Path) -> list[Row]:
    """Return the rows of all cases, run in one town."""
    with town(folder) as t:
        rows = meet(t)
        rows += routers(t)
        rows.append(relay_killed(t))
        rows.append(from_cache(t, rejoins))
        return rows
