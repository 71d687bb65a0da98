"""The arm of `bench wan` that is hivemind: as many peers average as many values on the same links."""

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.protocols.errors import LocalFault
from atoll_bench.child import Child, enter_all, started
from atoll_bench.wan.wan_nodes import carried
from atoll_lab.lab import Host

MODULE = "atoll_bench.wan.wan_hivemind"
PATIENCE_S, SLOWER = 20.0, 4.0
"""A step may take this long, and so many times what the slowest link needs."""
SWARMS = 3
"""hivemind loses a peer now and then, which looks for the others until its time is up. Then all begin anew."""
ANSWER_S = 10.0
WARM_UPS = 2
TURN = ("step", "match", "exchange")
BITS = {"float16": 16, "none": 32}
CLOSE = 1e-2
"""Averages of float16 values that went through float16 again agree so well."""


@dataclass(slots=True)
class Averaged:
    """Seconds of every turn: the slowest peer's, because the next round begins when all have the average."""

    step_s: list[float] = field(default_factory=list)
    """A whole `step()`: matchmaking and all-reduce."""
    exchange_s: list[float] = field(default_factory=list)
    """The all-reduce alone: the group was found before and waited for its trigger."""
    step_bytes: list[float] = field(default_factory=list)
    """Mean over nodes, both directions, headers and all."""
    failures: int = 0
    """Steps that ended without the whole group."""


async def average(
    hosts: Sequence[Host], values: int, compression: str, turns: int, say: Callable[[str], None]
) -> Averaged:
    """Whole steps, and all-reduces after a match, by turns. What fails is counted, and said."""
    seen = Averaged()
    for _ in range(SWARMS):
        try:
            await one_swarm(hosts, values, compression, turns, seen)
        except LocalFault as fault:
            say(f"hivemind, {compression}: {fault.line()}")
        if len(seen.exchange_s) >= turns:
            break
        seen.failures += 1
    say(f"hivemind, {compression}: {len(seen.exchange_s)} of {turns} turns, {seen.failures} steps failed")
    return seen


async def one_swarm(hosts: Sequence[Host], values: int, compression: str, turns: int, seen: Averaged) -> None:
    """Turns until there are enough, or a step fails."""
    limit_s = PATIENCE_S + SLOWER * least_s(hosts, values, compression)
    async with contextlib.AsyncExitStack() as stack:
        peers = await joined(stack, hosts, values, compression)
        for _ in range(WARM_UPS):
            if await attempt(peers, "step", limit_s) is None:
                return
        while len(seen.exchange_s) < turns:
            before = carried(hosts)
            seconds = {}
            for order in TURN:
                if (took_s := await attempt(peers, order, limit_s)) is None:
                    return
                seconds[order] = took_s
            seen.step_s.append(seconds["step"])
            seen.exchange_s.append(seconds["exchange"])
            seen.step_bytes.append((carried(hosts) - before) / len(hosts) / 2)
        agree([await peer.ask("values") for peer in peers])


def least_s(hosts: Sequence[Host], values: int, compression: str) -> float:
    """What an all-reduce takes at the least: a peer sends others their shares, and all of them its own."""
    bits = values * BITS[compression] * 2 * (len(hosts) - 1) / len(hosts)
    return max((bits / host.link.spec.up_bits_s for host in hosts if host.link.spec.up_bits_s), default=0.0)


async def joined(
    stack: contextlib.AsyncExitStack, hosts: Sequence[Host], values: int, compression: str
) -> list[Child]:
    """A peer on every host, each connected to all others. Raises LocalFault."""

    def peer(host: Host, *bootstrap: str) -> Any:
        arguments = (host.address, str(values), str(len(hosts)), compression, *bootstrap)
        return started(MODULE, *arguments, within=host.within)

    first = await stack.enter_async_context(peer(hosts[0]))
    bootstrap = await first.ask("address")
    peers = [first, *await enter_all(stack, [peer(host, bootstrap) for host in hosts[1:]])]
    addresses = [await one.ask("address") for one in peers]
    for at, one in enumerate(peers):
        await one.ask("meet", addresses=addresses[:at])
    return peers


async def attempt(peers: Sequence[Child], order: str, limit_s: float) -> float | None:
    """All peers obey at the same time; seconds of the slowest, None when one of them failed."""
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(told(peer, order, limit_s)) for peer in peers]
    seconds = [task.result() for task in asked]
    return None if None in seconds else max(one for one in seconds if one is not None)


async def told(peer: Child, order: str, limit_s: float) -> float | None:
    """Seconds that the peer needed, None when it could not."""
    try:
        seconds: float = await peer.ask(order, limit_s + ANSWER_S, limit_s=limit_s)
    except LocalFault:
        return None
    return seconds


def agree(values: Sequence[Sequence[float]]) -> None:
    """Raise LocalFault unless all peers hold the same average."""
    worst = max(max(of_one) - min(of_one) for of_one in zip(*values, strict=True))
    if worst > CLOSE * max(1.0, statistics.fmean(map(abs, values[0]))):
        raise LocalFault(f"hivemind's peers hold averages that differ by {worst:.3g}")
