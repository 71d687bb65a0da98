"""Gets a run's file from the seeds of an invite before the node joins: a short-lived host, a throw-away key."""

import asyncio
import os
import random
from collections.abc import Callable, Sequence

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.swarm.run_fetch import fetch_run
from atoll.p2p.system.backoff import backoff_s
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.errors import AtollError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId
from atoll.protocols.run.invite import Invite

FIRST_PAUSE_S = 2.0
MAX_PAUSE_S = 30.0


async def run_from_seeds(invite: Invite, say: Callable[[str], None]) -> bytes:
    """The verified `.run` file, asked for until it comes; `say` hears one line after each round of failures.

    Nothing is written, and the seeds do not learn this node's PeerID. Raises ConfigError for an illegal seed,
    LocalFault when the network stack cannot start.
    """
    seeds = [parse_seed(seed) for seed in invite.seed_texts]
    host = P2pdHost(Identity(os.urandom(32)))
    up = asyncio.Event()
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(host.serve(up.set))
            await up.wait()
            data = await until_found(host, seeds, invite.run, say)
            serving.cancel()
    except* AtollError as faults:
        raise _first(faults) from faults
    return data


async def until_found(host: Host, seeds: Sequence[PeerAddress], run: RunId, say: Callable[[str], None]) -> bytes:
    """`fetch_run`, again and again with back-off."""
    failures = 0
    while True:
        try:
            return await fetch_run(host, seeds, run)
        except Unreachable as error:
            failures += 1
            pause_s = backoff_s(failures, first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S)
            say(f"{error.line()}; trying again in {pause_s:.0f} s (Ctrl-C to stop)")
        await asyncio.sleep(pause_s * random.uniform(0.75, 1.25))


def _first(faults: BaseExceptionGroup[AtollError]) -> AtollError:
    inner: BaseException = faults
    while isinstance(inner, BaseExceptionGroup):
        inner = inner.exceptions[0]
    assert isinstance(inner, AtollError)
    return inner
