"""Four nodes that train across a shaped internet, beside the same four without shaping, in one run.

No bar: rounds an hour, the share of time in which a node waits, and what one link's cap lets through.
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.rig.lab import Home, Lab, LabSpec, LinkSpec, Nat, Public
from tests.rig.rig_node import RigNode, until
from tests.rig.tables import Row
from tests.rig.topologies import path_link

HOMES = ("home1", "home2", "home3")
RUN = ("outer.rounds=4000", "outer.stages=[[0,30]]", "inner.batch=2", "pace.lease_s=30", "pace.min_members=4")
START_S = 180.0
MEASURE_S = 60.0
CAP_BITS_S = 5e6
WINDOW_S = 10.0


def spec(link: LinkSpec) -> LabSpec:
    """A public seed and three homes."""
    return LabSpec(
        {"seed": Public(LinkSpec(delay_s=link.delay_s)), **{name: Home(Nat.CONE, link) for name in HOMES}}
    )


def started(lab: Lab, folder: Path, *words: str) -> list[RigNode]:
    """All four nodes, training."""
    nodes = [RigNode(host, folder) for host in lab]
    seed = nodes[0]
    flags = [part for change in RUN for part in ("--set", change)]
    seed.atoll("run", "new", "wan", "--preset", "tiny", "--seed", "1", *flags, "--data", "synthetic:markov")
    run_file = seed.home.run_file("wan")
    seed.start(run_file, "--relay")
    for node in nodes[1:]:
        node.start(run_file, *words, seeds=[seed.seed()])
    until("all train", lambda: all(node.status().get("final", -1) >= 1 for node in nodes), START_S)
    return nodes


def pace(nodes: Sequence[RigNode]) -> tuple[float, float]:
    """(rounds an hour, share of the time in which home1 waited) over MEASURE_S."""
    before, began = nodes[1].status()["round"], time.monotonic()
    time.sleep(MEASURE_S)
    gone_s, after = time.monotonic() - began, nodes[1].status()["round"]
    rows = [row for row in nodes[1].rounds() if before <= row["round"] < after and row["train_s"]]
    trained_s, waited_s = sum(r["train_s"] for r in rows), sum(r["wait_s"] or 0.0 for r in rows)
    return (after - before) * 3600 / gone_s, waited_s / max(trained_s + waited_s, 1e-9)


def measured(link: LinkSpec) -> tuple[float, float]:
    """Pace of four nodes on such links."""
    with tempfile.TemporaryDirectory(prefix="atoll-rig-") as folder, Lab(spec(link)) as lab:
        return pace(started(lab, Path(folder)))


def capped() -> Row:
    """home1 caps its upload while it trains; what its link carries over any ten seconds."""
    with tempfile.TemporaryDirectory(prefix="atoll-rig-") as folder, Lab(spec(LinkSpec(delay_s=0.015))) as lab:
        started(lab, Path(folder), "--up", "5mbit")
        link, seen = lab["home1"].link, []
        for _ in range(int(MEASURE_S)):
            seen.append((time.monotonic(), link.carried()[0]))
            time.sleep(1.0)
    rates = [
        (seen[at + 10][1] - seen[at][1]) * 8 / (seen[at + 10][0] - seen[at][0]) for at in range(len(seen) - 10)
    ]
    worst = max(rates) / CAP_BITS_S
    return Row(
        "upload cap 5 Mbit/s, link bytes over 10 s", "<= 105 %", f"{100 * worst:.0f} % at most", worst <= 1.05
    )


def all_rows() -> list[Row]:
    """The same story with and without an internet between the nodes."""
    near = measured(LinkSpec())
    far = measured(path_link("100mbit/20mbit", "60ms", "0ms", "0%"))
    lossy = measured(path_link("100mbit/20mbit", "60ms", "0ms", "1%"))
    rows = []
    for name, (an_hour, waited) in {
        "no shaping": near,
        "60 ms, 100/20 Mbit/s": far,
        "… and 1 % loss": lossy,
    }.items():
        text = f"{an_hour:.0f} rounds/h ({an_hour / near[0]:.2f} of no shaping), waits {100 * waited:.0f} %"
        rows.append(Row(f"4 nodes train: {name}", "shown", text, an_hour > 0))
    return [*rows, capped()]
