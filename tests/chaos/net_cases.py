"""F6, F7, F8: real nodes in namespaces: partitions in two parts, in one direction, flapping; loss; slow links."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from atoll_lab.capability import missing
from atoll_lab.lab import Lab, LabSpec, LinkSpec, Public
from atoll_lab.node import LabNode, until
from tests.chaos.heal_times import healed, read_journals
from tests.chaos.kill_cases import judged
from tests.chaos.report import NotRun, Result

NODES = 4
RUN = ("outer.rounds=100000", "outer.stages=[[0,4]]", "pace.lease_s=6", f"pace.min_members={NODES}")
LINK = LinkSpec(delay_s=0.01)
CUT_S, FULL_CUT_S = 30.0, 300.0
FLAP_S = 5.0
LOSS = 0.05
SLOW_BITS_S = 64_000
HEAL_ROUNDS = 3
"""Rounds that the newest node may be ahead of a healed one when they are in one chain again."""
LIMIT_S = 600.0


class Net:
    """Nodes on the lab's internet, and a blade between them."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._core = next(iter(lab)).link.core
        self.lab, self.nodes = lab, [LabNode(host, folder) for host in lab]

    def start(self, changes: Sequence[str] = RUN, data: str = "synthetic:markov", seed: int = 1) -> None:
        """Start all; wait until all train together."""
        first, *others = self.nodes
        flags = [part for change in changes for part in ("--set", change)]
        first.atoll("run", "new", "tiny", "--seed", str(seed), "--data", data, *flags)
        run_file = first.home.run_file("tiny")
        first.start(run_file)
        for node in others:
            node.start(run_file, seeds=[first.seed()])
        until("all have final rounds", lambda: min(self.finals()) >= 2, LIMIT_S)

    def finals(self) -> list[int]:
        """The newest final round of each node; −1 while it does not answer."""
        return [node.status().get("final", -1) for node in self.nodes]

    def cut(self, one: Sequence[int], other: Sequence[int], *, both: bool = True) -> None:
        """Drop what these hosts send to those, and in return unless it is a cut in one direction."""
        pairs = [(a, b) for a in one for b in other] + [(b, a) for a in one for b in other if both]
        rules = "".join(f"ip saddr {self._address(a)} ip daddr {self._address(b)} drop\n" for a, b in pairs)
        self.heal()
        self._core.nft(f"table ip chaos {{ chain cut {{ type filter hook forward priority 0\n{rules}}}\n}}\n")

    def heal(self) -> None:
        """Let everything through again."""
        self._core.nft("table ip chaos\ndelete table ip chaos\n")

    def one_chain(self) -> bool:
        """Whether all have the same digest of the newest round that is final on all, and few are ahead of it."""
        finals = [{row["round"]: row["digest"] for row in node.rounds() if row["final"]} for node in self.nodes]
        if not all(finals):
            return False
        newest = [max(each) for each in finals]
        common = min(newest)
        digests = {each.get(common) for each in finals}
        return len(digests) == 1 and None not in digests and max(newest) - common <= HEAL_ROUNDS

    def processes(self) -> list[psutil.Process]:
        """Those of all nodes."""
        return [process for node in self.nodes for process in node.processes()]

    def end(self) -> None:
        """End all in good order. Raises LabError."""
        started = [node for node in self.nodes if node.running]
        for node in started:
            node.terminate()
        for node in started:
            node.wait()

    def _address(self, number: int) -> str:
        return self.nodes[number].host.address


@contextmanager
def unstarted(folder: Path, count: int) -> Iterator[Net]:
    """Yield so many nodes of a lab of its own, none of which was started. Raises NotRun without a lab."""
    if (lack := missing()) is not None:
        raise NotRun(lack)
    with Lab(LabSpec({f"n{number}": Public(LINK) for number in range(count)})) as lab:
        found = Net(lab, folder)
        yield found
        found.end()


@contextmanager
def net(folder: Path) -> Iterator[Net]:
    """Yield the nodes of a lab of its own, all of which train. Raises NotRun where no lab can be had."""
    with unstarted(folder, NODES) as found:
        found.start()
        yield found


def halves(town: Net, seconds: float) -> None:
    """50/50."""
    town.cut([0, 1], [2, 3])
    time.sleep(seconds)


def minority(town: Net, seconds: float) -> None:
    """75/25: the smallest part of four nodes that is less than a third."""
    town.cut([0, 1, 2], [3])
    time.sleep(seconds)


def one_way(town: Net, seconds: float) -> None:
    """Two nodes hear nothing of the others, who hear them."""
    town.cut([0, 1], [2, 3], both=False)
    time.sleep(seconds)


def flapping(town: Net, seconds: float) -> None:
    """Cut and healed every 5 s."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        town.cut([0, 1], [2, 3])
        time.sleep(FLAP_S)
        town.heal()
        time.sleep(FLAP_S)


def loss(town: Net, seconds: float) -> None:
    """Every link loses 5 % in each direction."""
    for host in town.lab:
        host.link.set_loss(LOSS)
    time.sleep(seconds)
    for host in town.lab:
        host.link.set_loss(0.0)


def slow(town: Net, seconds: float) -> None:
    """One node has 64 kbit/s in each direction."""
    *_, last = town.lab
    last.link.set_rate(SLOW_BITS_S, SLOW_BITS_S)
    time.sleep(seconds)
    last.link.set_rate(None, None)


def case_of(name: str, fault: Callable[[Net, float], None]) -> Callable[[Path, int, bool], Result]:
    """The case that plays one fault."""

    def case(folder: Path, seed: int, full: bool) -> Result:
        with net(folder) as town:
            before = max(town.finals())
            fault(town, FULL_CUT_S if full else CUT_S)
            meanwhile = [final - before for final in town.finals()]
            town.heal()
            healed_at, newest = time.time(), max(town.finals())
            until("one chain", lambda: min(town.finals()) > newest and town.one_chain(), LIMIT_S)
        # The nodes' own journals, because a look at all of them takes as long as a round on a busy machine.
        finals, changes = read_journals([node.home.root for node in town.nodes])
        after = healed(finals, changes, NODES, healed_at)
        seen = f"final rounds meanwhile {meanwhile}, {after.line if after else 'no common round in the journals'}"
        result = judged(name, seed, folder, seen)
        if max(meanwhile) < 1:
            result.broken.append("rounds go on: none became final meanwhile")
        if after is None:
            result.broken.append("a healed partition has one digest: the journals have no common round after it")
        return result

    return case


CASES = {
    name: case_of(name, fault)
    for name, fault in (
        ("halves", halves),
        ("minority", minority),
        ("one-way", one_way),
        ("flapping", flapping),
        ("loss", loss),
        ("slow", slow),
    )
}
