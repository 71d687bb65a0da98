"""P9 over an hour: memory and descriptors of nodes among kills, freezes, departures and a liar.

Nodes that nothing strikes are measured: what a fresh process needs to get warm is no leak. Daemon, p2pd and worker
are told apart. The warm-up ends when their tables of rounds are full, which is a number of rounds: at the pace of
a full machine that takes 12 to 27 minutes. See `growth.py` for what may be said.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from atoll.cli.sim.homes import read_homes
from atoll.cli.sim.nodes import SimNode
from atoll.cli.sim.oracle import Verdict, judge
from atoll.cli.sim.swarm import Swarm, start
from atoll.node.daemon.reduction.ledger_view import REMEMBERED
from atoll.node.daemon.telemetry.round_rows import HELD_ROWS
from atoll.node.runs.capacity.open_rounds import PAST_PAYLOADS
from atoll_bench.goodput.storm import finals_of, town, wait_for_all
from tests.chaos.disk_cases import environment
from tests.chaos.growth import Said, Sample, Slope, slope, verdict, warmed
from tests.chaos.kill_cases import signal_all
from tests.chaos.report import Result

BARS = {"memory": (2.0, "MB"), "descriptors": (6.0, "fds")}
"""By what is judged: the growth in an hour that a node may have. A descriptor in ten minutes is a leak."""
SHOWN = ("daemon", "p2pd", "worker")
"""Memory of each kind of process: said, and part of `memory`."""
STRIKES = ("kill", "freeze", "leave")
AWAY_S = 10.0
"""How long a node is frozen, or gone after it left in good order."""
LOOK_S = 1.0
WARM_ROUNDS = max(HELD_ROWS, REMEMBERED, PAST_PAYLOADS)
"""After which a node's bounded tables are full, but those of 1,024 rounds, which take 0.5 kB a round."""


class Plan(NamedTuple):
    """How long, with whom, and how often something happens."""

    nodes: int
    seconds: float
    """That are measured, after the warm-up of all watched nodes."""
    every_s: float
    """Between two strikes."""
    warm_rounds: int = WARM_ROUNDS
    """Of a process' life that are not measured."""
    warm_most_s: float = 3600.0
    """After which the soak ends without a figure if they are not warm."""
    sample_s: float = 5.0
    changes: tuple[str, ...] = ()
    """Of the preset's run; without, its pace is that of users."""

    @property
    def liar(self) -> int:
        return self.nodes - 1

    @property
    def watched(self) -> range:
        """Nodes that nothing strikes."""
        return range(self.nodes // 2)

    @property
    def struck(self) -> range:
        return range(self.nodes // 2, self.liar)


SHORT = Plan(nodes=4, seconds=120.0, every_s=15.0)
FULL = Plan(nodes=8, seconds=3000.0, every_s=15.0)


class Act(NamedTuple):
    """What happens to a node, and when."""

    at_s: float
    what: str
    """A strike, or what ends one: `thaw`, `return`."""
    node: int


def acts(plan: Plan, seed: int) -> list[Act]:
    """What happens, in order of time, to the last second there may be. A strike ends before the next begins."""
    rng, found = random.Random(f"soak {seed}"), list[Act]()
    for number in range(1, int((plan.warm_most_s + plan.seconds) / plan.every_s)):
        at, what = number * plan.every_s, STRIKES[number % len(STRIKES)]
        node = rng.choice(plan.struck)
        found.append(Act(at, what, node))
        if what != "kill":
            found.append(Act(at + min(AWAY_S, plan.every_s / 2), "thaw" if what == "freeze" else "return", node))
    return found


def soak(folder: Path, seed: int, full: bool, minutes: float | None = None) -> Result:
    """Watch nodes that train among others that are struck. `minutes`: measured ones, else those of the plan."""
    plan = FULL if full else SHORT
    if minutes is not None:
        plan = plan._replace(seconds=60.0 * minutes)
    return soaked(folder, seed, plan)


def soaked(folder: Path, seed: int, plan: Plan) -> Result:
    """Play the plan, and judge what was seen and what is left."""
    homes = folder / "homes"
    homes.mkdir(parents=True)
    with environment({}), town(plan.nodes, seed, homes, changes=plan.changes) as swarm:
        wait_for_all(swarm, 1)
        swarm.nodes[plan.liar].kill()
        with environment({"CHAOS_LIES": "1"}):
            start(swarm, plan.liar)
        honest = replace(swarm, nodes={n: node for n, node in swarm.nodes.items() if n != plan.liar})
        wait_for_all(honest, max(finals_of(honest).values()))
        before = max(finals_of(honest).values())
        seen = Watch(swarm, plan, folder / "samples.csv").run(acts(plan, seed))
        rounds = max(finals_of(honest).values()) - before
        is_lying = swarm.nodes[plan.liar].running
        wait_for_all(honest, before + rounds)
    left = judge([history for history in read_homes(homes) if history.name != f"node-{plan.liar}"])
    return judged(plan, seed, seen, rounds, left, [] if is_lying else ["the liar ended by itself"])


def judged(
    plan: Plan, seed: int, samples: Sequence[Sample], rounds: int, left: Verdict, more: Sequence[str] = ()
) -> Result:
    """The result: the slopes of each watched node, and the oracle's verdict."""
    lines, said = list[str](), list[Said]()
    broken = [*map(str, left.violations), *more]
    for node in plan.watched:
        mine = [sample for sample in samples if sample.node == node]
        slopes = {what: slope(mine, what, plan.warm_rounds) for what in (*BARS, *SHOWN)}
        lines.append(f"node {node}: {text_of(slopes, mine)}")
        for what, (bar, unit) in BARS.items():
            said.append(slopes[what].said(bar))
            if said[-1] == "grows":
                broken.append(f"node {node}: {what} grow {slopes[what].text(unit)}, at most {bar:g} {unit}/h")
    measured = max(
        (slope(samples_of(samples, n), "memory", plan.warm_rounds).measured_s for n in plan.watched), default=0
    )
    ended_s = samples[-1].at_s if samples else 0.0
    struck = len([act for act in acts(plan, seed) if act.what in STRIKES and act.at_s <= ended_s])
    words = f"{plan.nodes} nodes, {ended_s / 60:.0f} min ({measured / 60:.0f} measured, from round"
    words += f" {plan.warm_rounds} of theirs on), {struck} strikes, a liar"
    seen = f"{words}, {rounds} rounds; {'; '.join(lines)}; {left.line}"
    undecided = "" if verdict(said) != "unsure" else "too short, or too noisy, to say that nothing grows"
    return Result("soak", seed, seen, broken, undecided=undecided)


def samples_of(samples: Sequence[Sample], node: int) -> list[Sample]:
    return [sample for sample in samples if sample.node == node]


def text_of(slopes: dict[str, Slope], samples: Sequence[Sample]) -> str:
    """All slopes of a node, and what it held in the end."""
    kinds = ", ".join(f"{kind} {slopes[kind].text('MB')}" for kind in SHOWN)
    ends = samples[-1].values if samples else {"memory": 0.0, "descriptors": 0.0}
    held = f"{ends['memory']:.0f} MB, {ends['descriptors']:.0f} fds in the end"
    return f"{slopes['memory'].text('MB')} ({kinds}), {slopes['descriptors'].text('fds')}, {held}"


@dataclass
class Watch:
    """Samples the watched nodes and strikes the others."""

    swarm: Swarm
    plan: Plan
    csv: Path
    found: list[Sample] = field(default_factory=list)
    _warm_s: float | None = None
    """When all watched nodes were warm."""

    def run(self, todo: Sequence[Act]) -> list[Sample]:
        """Until the time is over; the samples."""
        began = time.monotonic()
        waiting = list(todo)
        while (now := time.monotonic() - began) < self._ends_s():
            while waiting and waiting[0].at_s <= now:
                self._perform(waiting.pop(0))
            if not self.found or now >= self.found[-1].at_s + self.plan.sample_s:
                self._sample(now)
            time.sleep(LOOK_S)
        if waiting and waiting[0].what in ("thaw", "return"):
            self._perform(waiting[0])
        return self.found

    def _ends_s(self) -> float:
        return self.plan.warm_most_s if self._warm_s is None else self._warm_s + self.plan.seconds

    def _perform(self, act: Act) -> None:
        node = self.swarm.nodes[act.node]
        ways: dict[str, Callable[[], None]] = {
            "kill": partial(self._again, node),
            "freeze": partial(signal_all, self.swarm, [act.node], signal.SIGSTOP),
            "thaw": partial(signal_all, self.swarm, [act.node], signal.SIGCONT),
            "leave": node.stop,
            "return": partial(start, self.swarm, act.node),
        }
        ways[act.what]()

    def _again(self, node: SimNode) -> None:
        node.kill()
        start(self.swarm, node.number)

    def _sample(self, now: float) -> None:
        with self.csv.open("a") as file:
            for number in self.plan.watched:
                if (sample := sample_of(self.swarm.nodes[number], now)) is not None:
                    self.found.append(sample)
                    values = [f"{v:.2f}" for v in sample.values.values()]
                    file.write(",".join([f"{now:.0f}", str(number), str(sample.rounds), *values]) + "\n")
        if self._warm_s is None and self._all_are_warm():
            self._warm_s = now

    def _all_are_warm(self) -> bool:
        mine = [samples_of(self.found, number) for number in self.plan.watched]
        return all(warmed(life, self.plan.warm_rounds) for life in mine)


def sample_of(node: SimNode, now: float) -> Sample | None:
    """Anonymous memory in MB by kind of process and in all, and open descriptors; None while one is missing."""
    values, life = dict.fromkeys(SHOWN, 0.0), list[int]()
    descriptors = 0
    with suppress(OSError, psutil.Error):
        for process in node.processes():
            if (kind := kind_of(process)) in SHOWN:
                values[kind] += anonymous_mb(process.pid)
                descriptors += len(os.listdir(f"/proc/{process.pid}/fd"))
                life.append(process.pid)
        if all(values.values()) and (status := node.status()) is not None:
            read = {"memory": sum(values.values()), "descriptors": descriptors, **values}
            return Sample(now, node.number, tuple(life), int(status["final"]), read)
    return None


def kind_of(process: psutil.Process) -> str:
    """`daemon`, `worker` or `p2pd`; empty for what a node starts for a moment."""
    words = process.cmdline()
    if "atoll.node.worker.main" in words:
        return "worker"
    if "atoll.cli.main" in words:
        return "daemon"
    return "p2pd" if words and "p2pd" in Path(words[0]).name else ""


def anonymous_mb(pid: int) -> float:
    """RssAnon: memory that is no file's."""
    return next(float(words[1]) * 1024 / 1e6 for words in _status(pid) if words[0] == "RssAnon:")


def _status(pid: int) -> Iterator[list[str]]:
    with open(f"/proc/{pid}/status") as file:
        yield from (line.split() for line in file)
