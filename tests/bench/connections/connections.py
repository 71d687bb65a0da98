"""`bench connections`: memory of one node that holds many idle authenticated connections."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from atoll_bench.child import Child, enter_all, started
from atoll_bench.report import Bar, Row, row

COUNT, QUICK_COUNT = 1000, 40
CLIENTS = 2
"""Processes that share the identities."""
IDLE_S, QUICK_IDLE_S = 20.0, 1.0
PRUNED_S = 60.0
"""With the node's own limits: p2pd closes connections once they are 30 s old, every 10 s."""
SETTLE_S = 3.0
CONNECT_S = 300.0
OVER_BASE_MB = Bar("<=", 250.0)

Look = dict[str, float]


async def measure(
    quick: bool, say: Callable[[str], None], *, count: int | None = None, own_limits: bool = False
) -> list[Row]:
    """All rows. `own_limits`: p2pd may close what is above its usual limits. Raises LocalFault."""
    wanted = count or (QUICK_COUNT if quick else COUNT)
    limits = () if own_limits else (str(wanted + 100), str(wanted + 200))
    idle_s = PRUNED_S if own_limits else QUICK_IDLE_S if quick else IDLE_S
    async with contextlib.AsyncExitStack() as stack:
        node = await stack.enter_async_context(started("atoll_bench.connections.connections_node", *limits))
        crowds = await enter_all(
            stack, [started("atoll_bench.connections.connections_clients") for _ in range(CLIENTS)]
        )
        peer, maddrs = await node.ask("address")
        await asyncio.sleep(QUICK_IDLE_S if quick else SETTLE_S)
        base = await node.ask("look")
        began = time.perf_counter()
        await in_all(crowds, "connect", shares(wanted), peer=peer, maddrs=maddrs)
        say(f"{wanted} handshakes in {time.perf_counter() - began:.1f} s; idle for {idle_s:.0f} s")
        idle, cpu = await rest(node, idle_s)
        ends = sum(await in_all(crowds, "alive"))
        rows = rows_of(wanted, base, idle, ends, own_limits)
        rows.append(row("idle CPU of daemon + p2pd", 100 * cpu, "% of a core"))
        if not own_limits:
            streams = sum(await in_all(crowds, "greet"))
            greeted, _ = await rest(node, QUICK_IDLE_S if quick else SETTLE_S)
            note = f"{streams} calls streams, one a connection, as members hold"
            rows.append(row("over the base with calls streams", over(base, greeted), "MB", note=note))
    return rows


def rows_of(wanted: int, base: Look, idle: Look, ends: int, own_limits: bool) -> list[Row]:
    """Base, with connections, and the difference. The bar is that of 1,000 connections."""
    bar = OVER_BASE_MB if wanted == COUNT and not own_limits else None
    all_held = None if own_limits else Bar(">=", wanted)
    note = f"of {wanted}, with the node's own limits" if own_limits else f"of {wanted}"
    rows = [
        row("connections after the rest, node's side", idle["peers"], "", all_held, note=note),
        row("connections after the rest, clients' side", ends, "", all_held, note=note),
    ]
    for name, look in (("base", base), ("with connections", idle)):
        rows.append(row(f"{name}: daemon", look["node_bytes"] / 1e6, "MB"))
        rows.append(row(f"{name}: p2pd", look["p2pd_bytes"] / 1e6, "MB"))
    return [*rows, row("over the base, daemon + p2pd", over(base, idle), "MB", bar)]


def over(base: Look, now: Look) -> float:
    """MB that both processes have more than at `base`."""
    return sum(now[key] - base[key] for key in ("node_bytes", "p2pd_bytes")) / 1e6


def shares(count: int) -> list[int]:
    """`count` over the client processes."""
    return [count // CLIENTS + (number < count % CLIENTS) for number in range(CLIENTS)]


async def rest(node: Child, seconds: float) -> tuple[Look, float]:
    """How the node is after a rest, and the share of a core that it took meanwhile."""
    before, began = await node.ask("look"), time.perf_counter()
    await asyncio.sleep(seconds)
    after: Look = await node.ask("look")
    return after, (after["cpu_s"] - before["cpu_s"]) / (time.perf_counter() - began)


async def in_all(
    crowds: list[Child], order: str, counts: list[int] | None = None, **arguments: object
) -> list[int]:
    """The same order to all client processes at the same time."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                crowd.ask(order, CONNECT_S, **arguments, **({"count": counts[at]} if counts else {}))
            )
            for at, crowd in enumerate(crowds)
        ]
    return [task.result() for task in tasks]
