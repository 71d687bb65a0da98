"""`bench blobs`: one holder against a raw stream of the same bytes; four slow holders; one of four lies."""

import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.protocols.errors import LocalFault
from atoll_bench.child import Child, enter_all, started
from atoll_bench.report import Bar, Row, median, paired_ratio, row
from atoll_bench.space import Plug, can_shape, empty_space, plug_in, space_of

MODULE = "atoll_bench.blobs.blobs_node"
MIB = 1 << 20
UP_BIT_S, DOWN_BIT_S = 20_000_000, 100_000_000
HOLDERS = 4
OF_RAW, OF_SUM, LIAR_COSTS, ALWAYS = Bar(">=", 0.6), Bar(">=", 0.9), Bar("<=", 1.1), Bar(">=", 1)
DOWNLOAD_S = 300.0


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure."""

    loopback_mib: int
    loopback_repetitions: int
    slow_mib: int
    slow_repetitions: int


FULL, QUICK = Effort(256, 5, 48, 3), Effort(16, 1, 4, 1)


@dataclass(frozen=True, slots=True)
class Peer:
    """A node and where it is dialled."""

    child: Child
    id: str
    maddrs: Sequence[str]


async def measure(quick: bool, say: Callable[[str], None], *, mib: int | None = None) -> list[Row]:
    """All rows; `mib` is the size of the blob that four holders serve. Raises LocalFault."""
    effort = QUICK if quick else FULL
    rows = await one_holder(effort, say)
    return rows + await slow_holders(mib or effort.slow_mib, effort.slow_repetitions, say)


async def one_holder(effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """Blob and raw stream take turns between the same two nodes."""
    mib, repetitions = effort.loopback_mib, effort.loopback_repetitions
    costs: dict[str, list[Cost]] = {"blob": [], "raw": [], "saved": []}
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as root:
        async with contextlib.AsyncExitStack() as stack:
            holder, fetcher = await enter_all(stack, [node(root, "holder"), node(root, "fetcher")])
            blob = await holder.child.ask("make", mib=mib)
            await fetcher.child.ask("connect", peer=holder.id, maddrs=holder.maddrs)
            for turn in range(repetitions):
                for at in range(len(costs)):
                    way = list(costs)[(turn + at) % len(costs)]
                    costs[way].append(await one_way(way, fetcher, holder, blob, mib * MIB))
    say(f"one holder: {repetitions} repetitions done")
    return rows_of_one(mib, costs)


async def one_way(way: str, fetcher: Peer, holder: Peer, blob: str, size: int) -> "Cost":
    """One transfer of the blob's bytes."""
    before = [await peer.child.ask("cpu_s") for peer in (fetcher, holder)]
    if way == "blob":
        seconds = (await fetch(fetcher, blob, [holder], size))["seconds"]
    else:
        seconds = await fetcher.child.ask(way, DOWNLOAD_S, peer=holder.id, blob=blob, size=size)
    after = [await peer.child.ask("cpu_s") for peer in (fetcher, holder)]
    return Cost(seconds, sum(after) - sum(before))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one transfer: time, and CPU time of both nodes with their p2pd."""

    seconds: float
    cpu_s: float


def rows_of_one(mib: int, costs: dict[str, list[Cost]]) -> list[Row]:
    """The figures of one holder. CPU time suffers least from what else a shared machine does."""
    label = f"1 holder, {mib} MiB, loopback"
    blob, raw, saved = ([cost.seconds for cost in costs[way]] for way in ("blob", "raw", "saved"))
    blob_cpu, raw_cpu = ([cost.cpu_s for cost in costs[way]] for way in ("blob", "raw"))
    return [
        row(f"{label}: blob", speed(mib * MIB, blob, 1e6), "MB/s"),
        row(f"{label}: raw p2pd stream", speed(mib * MIB, raw, 1e6), "MB/s"),
        row(f"{label}: raw p2pd stream, hashed, on disk", speed(mib * MIB, saved, 1e6), "MB/s"),
        row(f"{label}: blob / raw", paired_ratio(raw, blob), "x", OF_RAW),
        row(f"{label}: blob / raw, best of each", min(raw) / min(blob), "x"),
        row(f"{label}: blob / raw, by CPU time of both ends", paired_ratio(raw_cpu, blob_cpu), "x"),
        row(f"{label}: blob / raw, hashed, on disk", paired_ratio(saved, blob), "x"),
    ]


async def slow_holders(mib: int, repetitions: int, say: Callable[[str], None]) -> list[Row]:
    """Four honest holders, three, and three with a liar take turns."""
    seen = Seen([], [], [], [])
    async with contextlib.AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(slow_swarm(say))
        blob = ""
        for peer in (*swarm.honest, swarm.liar):
            blob = await peer.child.ask("make", mib=mib)
            await swarm.fetcher.child.ask("connect", peer=peer.id, maddrs=peer.maddrs)
        for turn in range(repetitions):
            await seen.turn(swarm, blob, mib * MIB, turn)
        say(f"four holders: {repetitions} repetitions done; rates by {swarm.means}")
    return rows_of(seen, mib, swarm.means)


@dataclass(frozen=True, slots=True)
class Swarm:
    """Slow holders and one who fetches."""

    fetcher: Peer
    honest: Sequence[Peer]
    liar: Peer
    means: str
    """What makes them slow."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Seconds of every repetition; of the liar's downloads also who was blamed rightly and what arrived whole."""

    four_s: list[float]
    three_s: list[float]
    liar_s: list[float]
    liar: list[tuple[bool, bool]]

    async def turn(self, swarm: Swarm, blob: str, size: int, turn: int) -> None:
        """Each way once; the liar has another place among the holders every time."""
        three = list(swarm.honest[:-1])
        with_liar = list(three)
        with_liar.insert(turn % HOLDERS, swarm.liar)
        self.four_s.append((await fetch(swarm.fetcher, blob, swarm.honest, size))["seconds"])
        self.three_s.append((await fetch(swarm.fetcher, blob, three, size))["seconds"])
        result = await fetch(swarm.fetcher, blob, with_liar, size)
        self.liar_s.append(result["seconds"])
        self.liar.append((set(result["blamed"]) == {swarm.liar.id}, result["right"]))


def rows_of(seen: Seen, mib: int, means: str) -> list[Row]:
    """The figures of the slow holders."""
    label = f"{HOLDERS} holders at {UP_BIT_S // 10**6} Mbit/s up, {mib} MiB"
    total = HOLDERS * UP_BIT_S
    rate = speed(mib * MIB * 8, seen.four_s, 1)
    named, right = (sum(each[at] for each in seen.liar) / len(seen.liar) for at in (0, 1))
    no_help = "the liar's uplink is missing: 1.33 at best"
    return [
        row(f"{label}: contents", rate and rate / 1e6, "Mbit/s", note=f"rates by {means}"),
        row(f"{label}: share of the sum of uplinks", rate and rate / total, "x", OF_SUM),
        row(f"{label}, one lies: time", median(seen.liar_s), "s"),
        row(
            f"{label}, one lies: time / the three honest alone",
            paired_ratio(seen.liar_s, seen.three_s),
            "x",
            LIAR_COSTS,
        ),
        row(f"{label}, one lies: time / four honest", paired_ratio(seen.liar_s, seen.four_s), "x", note=no_help),
        row(f"{label}, one lies: only the liar named, share of runs", named, "x", ALWAYS),
        row(f"{label}, one lies: digest right, share of runs", right, "x", ALWAYS),
    ]


def speed(size: int, seconds: Sequence[float], unit: float) -> float | None:
    """`size` per median second, in `unit`."""
    middle = median(seconds)
    return size / middle / unit if middle else None


async def fetch(fetcher: Peer, blob: str, holders: Sequence[Peer], size: int) -> dict[str, Any]:
    """One download. Raises LocalFault when the blob is not what its id names."""
    ids = [holder.id for holder in holders]
    result: dict[str, Any] = await fetcher.child.ask("fetch", DOWNLOAD_S, blob=blob, holders=ids, max_bytes=size)
    return result


@contextlib.asynccontextmanager
async def node(
    root: str, name: str, *flags: str, ip: str = "127.0.0.1", within: Sequence[str] = ()
) -> AsyncIterator[Peer]:
    """A node with a folder of its own. Raises LocalFault."""
    async with started(MODULE, str(Path(root, name)), ip, *flags, within=within) as child:
        peer, maddrs = await child.ask("address")
        yield Peer(child, peer, [maddr for maddr in maddrs if f"/{ip}/" in maddr])


@contextlib.asynccontextmanager
async def slow_swarm(say: Callable[[str], None]) -> AsyncIterator[Swarm]:
    """In networks with slow links where we may make them; else every node limits itself. Raises LocalFault."""
    async with contextlib.AsyncExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-"))
        machines = await shaped(stack, say) if can_shape() else None
        nodes = []
        for number in range(HOLDERS + 2):
            name, flags = f"node{number}", ["lies"] if number == HOLDERS + 1 else []
            if machines is None:
                rate = f"down={DOWN_BIT_S}bit" if number == 0 else f"up={UP_BIT_S}bit"
                nodes.append(node(root, name, *flags, rate))
            else:
                machine = machines[number]
                nodes.append(node(root, name, *flags, ip=machine.ip, within=space_of(machine.pid)))
        peers = await enter_all(stack, nodes)
        means = "atoll's own [limits]" if machines is None else "network namespaces and tc tbf"
        yield Swarm(peers[0], peers[1 : HOLDERS + 1], peers[HOLDERS + 1], means)


async def shaped(stack: contextlib.AsyncExitStack, say: Callable[[str], None]) -> list[Plug] | None:
    """The fetcher's network, then the holders'; None, and a line why, where the kernel refuses."""
    try:
        switch = await stack.enter_async_context(empty_space())
        plugs = []
        for number in range(HOLDERS + 2):
            pid = await stack.enter_async_context(empty_space())
            up, down = (None, DOWN_BIT_S) if number == 0 else (UP_BIT_S, None)
            plugs.append(Plug(pid, f"10.77.0.{number + 1}", up, down))
        await plug_in(switch, plugs)
    except LocalFault as fault:
        say(f"no links of a given rate here ({fault.line()}): every node limits itself")
        return None
    return plugs
