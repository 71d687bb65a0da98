"""Four nodes that train across a shaped internet, beside the same four without shaping, in one run.

No bar: rounds an hour, the share of time in which a node waits, and what one link's cap lets through.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from atoll_lab.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from atoll_lab.node import LabNode, until
from tests.rig.remote import Remote
from tests.rig.tables import Row
from tests.rig.topologies import path_link

HOMES = ("home1", "home2", "home3")
RUN = ("outer.rounds=4000", "outer.stages=[[0,30]]", "inner.batch=2", "pace.lease_s=30", "pace.min_members=4")
START_S = 600.0
MEASURE_S = 60.0
CAP_BITS_S = 5e6
WINDOW_S = 10.0
CAPPED_BYTES = 24 << 20
CAPPED_S = 30.0
POLL_S = 0.25


def spec(link: LinkSpec) -> LabSpec:
    """Return a lab of a public seed and three homes."""
    return LabSpec(
        {"seed": Public(LinkSpec(delay_s=link.delay_s)), **{name: Home(Nat.CONE, link) for name in HOMES}}
    )


def started(lab: Lab, folder: Path) -> list[LabNode]:
    """Yield all four nodes, training."""
    nodes = [LabNode(host, folder) for host in lab]
    seed = nodes[0]
    flags = [part for change in RUN for part in ("--set", change)]
    seed.atoll("run", "new", "wan", "--preset", "tiny", "--seed", "1", *flags, "--data", "synthetic:markov")
    run_file = seed.home.run_file("wan")
    seed.start(run_file, "--relay")
    for node in nodes[1:]:
        node.start(run_file, seeds=[seed.seed()])
    until("all train", lambda: all(node.status().get("final", -1) >= 1 for node in nodes), START_S)
    return nodes


def pace(nodes: Sequence[LabNode]) -> tuple[float, float]:
    """Return (rounds an hour, share of the time in which home1 waited) over MEASURE_S."""
    before, began = nodes[1].answered()["round"], time.monotonic()
    time.sleep(MEASURE_S)
    gone_s, after = time.monotonic() - began, nodes[1].answered()["round"]
    rows = [row for row in nodes[1].rounds() if before <= row["round"] < after and row["train_s"]]
    trained_s, waited_s = sum(r["train_s"] for r in rows), sum(r["wait_s"] + r["transfer_s"] for r in rows)
    return (after - before) * 3600 / gone_s, waited_s / max(trained_s + waited_s, 1e-9)


def measured(link: LinkSpec, folder: Path) -> tuple[float, float]:
    """Return the pace of four nodes on such links, with homes in `folder`."""
    with Lab(spec(link)) as lab:
        return pace(started(lab, folder))


def capped(folder: Path) -> Row:
    """Return what home1's link carries with headers, over any ten seconds, while it sends as fast as it may."""
    link = LinkSpec(delay_s=0.015)
    with Lab(LabSpec({"seed": Public(link), "home1": Home(Nat.CONE, link)})) as lab:
        seed, home = Remote(lab["seed"], folder), Remote(lab["home1"], folder)
        seed.new(1, 4001)
        home.new(2, 20_000, up="5mbit")
        home.meet(seed)
        home.begin("say", peer=seed.peer, size=CAPPED_BYTES)
        seen = []
        for _ in range(int(CAPPED_S / POLL_S)):
            seen.append((time.monotonic(), lab["home1"].link.carried()[0]))
            time.sleep(POLL_S)
        home.wait()
    width = int(WINDOW_S / POLL_S)
    pairs = zip(seen, seen[width:], strict=False)
    shares = [(after[1] - first[1]) * 8 / (after[0] - first[0]) / CAP_BITS_S for first, after in pairs]
    text = f"{100 * max(shares):.1f} % at most, {100 * min(shares):.1f} % at least"
    return Row("upload cap 5 Mbit/s, bytes on the link", "<= 105 % over any 10 s", text, 0.7 < max(shares) <= 1.05)


def all_rows(folder: Path) -> list[Row]:
    """Return the rows of all cases, with and without an internet between the nodes."""
    near = measured(LinkSpec(), folder / "near")
    far = measured(path_link("100mbit/20mbit", "60ms", "0ms", "0%"), folder / "far")
    lossy = measured(path_link("100mbit/20mbit", "60ms", "0ms", "1%"), folder / "lossy")
    rows = []
    for name, (an_hour, waited) in {
        "no shaping": near,
        "60 ms, 100/20 Mbit/s": far,
        "… and 1 % loss": lossy,
    }.items():
        text = f"{an_hour:.0f} rounds/h ({an_hour / near[0]:.2f} of no shaping), waits {100 * waited:.0f} %"
        rows.append(Row(f"4 nodes train: {name}", "shown", text, an_hour > 0))
    return rows
