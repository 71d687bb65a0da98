"""Whole nodes that train behind home routers: what they lose when relays, seeds, ports and addresses go away.

Two public nodes relay; home1 and home3 are behind port-keeping routers, home2 behind a symmetric one.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll_lab.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from atoll_lab.namespaces import LabError
from atoll_lab.node import LabNode, until
from tests.rig.tables import Row

LINK = LinkSpec(delay_s=0.015)
RUN = ("outer.rounds=4000", "outer.stages=[[0,60]]", "inner.batch=2", "pace.lease_s=20", "pace.min_members=2")
HOMES = ("home1", "home2", "home3")
JOIN_S = 120.0
SETTLE_S = 15.0
"""After this time without a break, what was done to a router did not hurt."""
BAR_S = 15.0


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

    def missing(self, author: str, witness: str, since: int) -> int:
        """Return the rounds after `since` that the witness closed without the author's work."""
        rows = [row for row in self[witness].rounds() if row["round"] > since and row["final"]]
        return sum(1 for row in rows if self[author].peer not in row["contributors"])


@contextmanager
def town() -> Iterator[Town]:
    """Yield a town in a lab of its own, with all nodes training."""
    kinds = {"home1": Nat.CONE, "home2": Nat.SYMMETRIC, "home3": Nat.CONE}
    hosts = {"seed": Public(LINK), "other": Public(LINK), **{n: Home(k, LINK) for n, k in kinds.items()}}
    with tempfile.TemporaryDirectory(prefix="atoll-rig-") as folder, Lab(LabSpec(hosts)) as lab:
        found = Town(lab, Path(folder))
        found.start()
        yield found


def meet(t: Town) -> list[Row]:
    """Wait until all nodes are connected over the paths that they should have."""
    wanted = {("home1", "home3"): "punched", ("home1", "home2"): "relayed", ("home2", "home3"): "relayed"}
    rows = []
    for (a, b), path in wanted.items():
        took_s = until(f"{a} and {b} are {path}", lambda a=a, b=b, path=path: t.path(a, b) == path, JOIN_S)
        rows.append(Row(f"nodes {a}–{b}", path, f"{path} {took_s:.1f} s after the last start", True))
    latest_s = max(t.known_s.values())
    found = ", ".join(f"{name} {t.reach(name)}" for name in ("seed", *HOMES))
    rows.append(Row("reach known after the start", "<= 10 s", f"{latest_s:.1f} s; {found}", latest_s <= 10.0))
    final = t["home1"].status()["final"]
    until("rounds are final", lambda: t["home1"].status().get("final", -1) >= final + 2, JOIN_S)
    return rows


def after(t: Town, pair: tuple[str, str], hurt: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds until the pair works again, and the rounds without home1's work."""
    since = t["home3"].status()["round"]
    hurt()
    began = time.monotonic()
    try:
        until("the connection breaks", lambda: not t.works(*pair), SETTLE_S)
    except LabError:
        return 0.0, 0
    until("the connection is back", lambda: t.works(*pair), 4 * BAR_S)
    took_s = time.monotonic() - began
    until("rounds go on", lambda: t["home3"].status().get("round", 0) >= since + 3, JOIN_S)
    return took_s, t.missing("home1", "home3", since)


def routers(t: Town) -> list[Row]:
    """A router forgets its mappings, one changes ports, one gets another address."""
    router = t.lab.router("home1")
    hurts: dict[str, Callable[[], object]] = {
        "conntrack flush": router.flush_conntrack,
        "NAT rebind, other ports": router.rebind,
        "address change": router.change_address,
    }
    rows = []
    for name, hurt in hurts.items():
        took_s, lost = after(t, ("home1", "home3"), hurt)
        text = f"{took_s:.1f} s, {lost} rounds without home1" if took_s else "did not break"
        rows.append(Row(name, "<= 15 s, no lost round", text, took_s <= BAR_S and not lost))
    return rows


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


def all_rows(rejoins: int) -> list[Row]:
    """Return the rows of all cases, run in one town."""
    with town() as t:
        rows = meet(t)
        rows += routers(t)
        rows.append(relay_killed(t))
        rows.append(from_cache(t, rejoins))
        return rows
