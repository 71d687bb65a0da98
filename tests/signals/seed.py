"""A seed that hands out a run and does nothing else, on a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from atoll.p2p.swarm.run_fetch import serve_run
from atoll.p2p.system.key_file import load_or_create
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.identity import Identity
from atoll.protocols.run.invite import make_invite, seeds_of
from atoll.protocols.run.run_spec import open_run
from tests.waiting import HANGS_S

VALID_S = 86_400


@contextmanager
def served(run_file: bytes, owner_key: Path) -> Iterator[str]:
    """An invite to the run, without the run in it: who starts with it fetches the run from the seed."""
    host, link = P2pdHost(Identity(bytes([9]) * 32)), Future[str]()
    loop, over = asyncio.new_event_loop(), asyncio.Event()
    serve_run(host, run_file)

    async def serve() -> None:
        async with asyncio.TaskGroup() as group:
            up = asyncio.Event()
            serving = group.create_task(host.serve(up.set))
            await up.wait()
            seeds = seeds_of([f"{maddr}/p2p/{host.peer_id}" for maddr in await host.addresses()])
            link.set_result(
                make_invite(load_or_create(owner_key), open_run(run_file).id, seeds, int(time.time()) + VALID_S)
            )
            await over.wait()
            serving.cancel()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        yield link.result(timeout=HANGS_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()
