"""The arm of `bench wan` that is hivemind: as many peers average as many values on the same links."""

import asyncio
import contextlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.cli.benches.child import Child, enter_all, started
from atoll.cli.benches.wan_nodes import carried
from atoll.cli.lab.lab import Host
from atoll.protocols.errors import LocalFault

MODULE = "atoll.cli.benches.wan_hivemind"
PATIENCE_S, SLOWER = 20.0, 4.0
"""A step may take this long and so many times what the slowest link needs. hivemind loses a peer now and then, which
then looks for the others until its time is up."""
ANSWER_S = 10.0
WARM_UPS = 2
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
    failures: int = 0
    """Steps that ended without the whole group."""
    round_bytes: float = 0.0
    """Mean over nodes and steps, both directions, headers and all."""


async def average(
    hosts: Sequence[Host], values: int, compression: str, turns: int, say: Callable[[str], None]
) -> Averaged:
    """`turns` whole steps and `turns` all-reduces after a match, by turns. Raises LocalFault."""
    seen = Averaged()
    limit_s = PATIENCE_S + SLOWER * least_s(hosts, values, compression)
    async with contextlib.AsyncExitStack() as stack:
        peers = await joined(stack, hosts, values, compression)
        for _ in range(WARM_UPS):
            await attempt(peers, "step", limit_s)
        before, done = carried(hosts), 0
        for _ in range(turns):
            for order, times in (("step", seen.step_s), ("match", None), ("exchange", seen.exchange_s)):
                seconds = await attempt(peers, order, limit_s)
                if seconds is None:
                    seen.failures += 1
                    await asyncio.gather(*(peer.ask("drop") for peer in peers))
                    break
                done += order != "match"
                if times is not None:
                    times.append(seconds)
        seen.round_bytes = (carried(hosts) - before) / len(hosts) / max(done, 1)
        if seen.exchange_s:
            agree([await peer.ask("values") for peer in peers])
    say(f"hivemind, {compression}: {len(seen.exchange_s)} of {turns} turns")
    return seen


def least_s(hosts: Sequence[Host], values: int, compression: str) -> float:
    """What an all-reduce needs at the least: every peer sends its share of the sums and its values to the others'."""
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
