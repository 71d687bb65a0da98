"""`bench calls`: request and reply on loopback; ours, bare p2pd unary calls, and lattica, in turns in one run.

Each way has two Python processes, one that asks and one that answers, and the same number of calls in flight.
"""

import contextlib
import importlib.util
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from atoll.protocols.errors import LocalFault
from atoll_bench.child import Child, enter_all, started
from atoll_bench.report import Bar, Row, median, paired_ratio, row
from atoll_bench.space import can_isolate, new_space, space_of

LATTICA_WISH = "lattica>=1.0.21,<2"
OVER_LATTICA = Bar(">=", 2.0)
OF_BARE = Bar(">=", 0.8)
ATOLL, BARE, LATTICA = "atoll", "bare p2pd unary", "lattica"
_WARM_S = 0.2
_PORTS = ("4001", "4002")
"""Fixed, because lattica does not tell which port it got; its network is its own."""


@dataclass(frozen=True, slots=True)
class Size:
    """One kind of echo."""

    label: str
    size: int
    in_flight: int


SIZES = (Size("128 B", 128, 64), Size("256 KiB", 256 * 1024, 16))


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    repetitions: int
    seconds: float


FULL, QUICK = Effort(5, 1.5), Effort(1, 0.2)


async def measure(quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All rows. Raises LocalFault when our own side fails; a rival that fails is a row that is not measured."""
    effort = QUICK if quick else FULL
    async with contextlib.AsyncExitStack() as stack:
        turns = Turns(await lattica_reason())
        for name, module in ((ATOLL, "calls_atoll"), (BARE, "calls_bare")):
            turns.askers[name] = await stack.enter_async_context(pair(f"atoll_bench.calls.{module}"))
        if turns.lattica_reason is None:
            try:
                turns.askers[LATTICA] = await stack.enter_async_context(lattica_pair())
            except LocalFault as fault:
                turns.lattica_reason = fault.line()
        for size in SIZES:
            await turns.take(size, effort)
            say(f"{size.label}: {effort.repetitions} repetitions done")
    if turns.lattica_reason is not None:
        say(f"lattica: not measured: {turns.lattica_reason}")
    return [made for size in SIZES for made in rows_of(size, turns.rates, turns.lattica_reason)]


class Turns:
    """Who takes turns, and what was measured."""

    def __init__(self, lattica_reason: str | None) -> None:
        self.askers: dict[str, Child] = {}
        self.rates: dict[tuple[str, Size], list[float]] = {}
        self.lattica_reason = lattica_reason

    async def take(self, size: Size, effort: Effort) -> None:
        """Every way as often as `effort` says; another one begins every time. The first turn only warms up."""
        for turn in range(effort.repetitions + 1):
            names = list(self.askers)
            for at in range(len(names)):
                name = names[(at + turn) % len(names)]
                rate = await self._one(name, size, effort.seconds if turn else _WARM_S)
                if turn and rate is not None:
                    self.rates.setdefault((name, size), []).append(rate)

    async def _one(self, name: str, size: Size, seconds: float) -> float | None:
        try:
            rate: float = await self.askers[name].ask(
                "echo", size=size.size, in_flight=size.in_flight, seconds=seconds
            )
        except LocalFault as fault:
            if name != LATTICA:
                raise
            self.lattica_reason = fault.line()
            del self.askers[name]
            return None
        return rate


def rows_of(size: Size, rates: dict[tuple[str, Size], list[float]], reason: str | None) -> list[Row]:
    """The figures of one size, and ours over theirs."""
    atoll, bare, lattica = (rates.get((name, size), []) for name in (ATOLL, BARE, LATTICA))
    label, missing = f"{size.label} x {size.in_flight} in flight", reason or ""
    return [
        row(f"{label}: atoll", median(atoll), "calls/s"),
        row(f"{label}: bare p2pd unary", median(bare), "calls/s"),
        row(f"{label}: lattica", median(lattica), "calls/s", note=missing),
        row(f"{label}: atoll / bare p2pd unary", paired_ratio(atoll, bare), "x", OF_BARE),
        row(f"{label}: atoll / lattica", paired_ratio(atoll, lattica), "x", OVER_LATTICA, note=missing),
    ]


@contextlib.asynccontextmanager
async def pair(module: str) -> AsyncIterator[Child]:
    """Two children that are connected; the one that asks."""
    async with contextlib.AsyncExitStack() as stack:
        asker, answerer = await enter_all(stack, [started(module), started(module)])
        peer, maddrs = await answerer.ask("address")
        await asker.ask("address")  # it is up
        await asker.ask("connect", peer=peer, maddrs=maddrs)
        yield asker


async def lattica_reason() -> str | None:
    """Why lattica cannot be measured here."""
    if importlib.util.find_spec("lattica") is None:
        return f"it is not installed: pip install '{LATTICA_WISH}'"
    if not await can_isolate():
        return "it contacts STUN servers at every start, so it needs a network of its own: run as root"
    return None


@contextlib.asynccontextmanager
async def lattica_pair() -> AsyncIterator[Child]:
    """Two lattica nodes in a network of their own; the one that asks. Raises LocalFault."""
    module = "atoll_bench.calls.calls_lattica"
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as root:
        folders = [Path(root, name) for name in ("answers", "asks")]
        for folder in folders:
            folder.mkdir()
        async with started(module, str(folders[0]), _PORTS[0], within=new_space()) as answerer:
            peer = await answerer.ask("address")
            bootstrap = f"/ip4/127.0.0.1/tcp/{_PORTS[0]}/p2p/{peer}"
            inside = space_of(answerer.pid)
            async with started(module, str(folders[1]), _PORTS[1], bootstrap, within=inside) as asker:
                await asker.ask("connect")
                yield asker
