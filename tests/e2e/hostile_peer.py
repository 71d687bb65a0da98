"""A hostile peer beside real nodes: another identity of this machine, with a p2pd of its own."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.address_book import parse_seed
from atoll_bench.host import fresh_p2pd


@contextmanager
def beside_us(serve: Callable[[Host, Sequence[PeerAddress]], Awaitable[None]], seeds: list[str]) -> Iterator[None]:
    """`serve` has a host and the addresses of `seeds`, in a thread, while the block lasts."""
    loop = asyncio.new_event_loop()
    work = loop.create_task(serve(fresh_p2pd(), [parse_seed(seed) for seed in seeds]))

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(asyncio.wait([work]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(work.cancel)
        thread.join()
        loop.close()
