"""A lookup in the DHT: ask the nearest known peers, then nearer ones that they name, within a deadline."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable

from atoll.p2p.discovery.dht_records import RECORDS_PER_KEY
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.host.maddrs import MADDRS_PER_PEER
from atoll.protocols.ids import PeerId

NEAREST = 8
"""A lookup ends when so many of the nearest peers have answered."""
LOOKUP_S = 12.0
"""Deadline of a lookup, in seconds: peers that do not exist cost no more than this."""

Answer = tuple[tuple[bytes, ...], tuple[PeerAddress, ...]]
"""Records at the target, and peers that are near it."""
Answers = dict[PeerAddress, tuple[bytes, ...]]
"""Records by peer, the nearest peer first."""


async def look_up(
    start: Iterable[PeerAddress],
    distance: Callable[[PeerId], int],
    ask: Callable[[PeerAddress], Awaitable[Answer | None]],
) -> Answers:
    """Records by peer, the nearest first. `ask` returns None for a peer that does not answer."""
    known = {address.peer: address for address in start}
    asked: set[PeerId] = set()
    answers: Answers = {}

    async def one(address: PeerAddress) -> None:
        answer = await ask(address)
        if answer is None:
            del known[address.peer]
        else:
            answers[address] = answer[0]
            for named in answer[1]:
                if named.peer not in asked:
                    # A liar that names an honest server with false addresses does not take away the true ones.
                    maddrs = (*known.get(named.peer, named).maddrs, *named.maddrs)
                    known[named.peer] = PeerAddress(named.peer, tuple(dict.fromkeys(maddrs))[:MADDRS_PER_PEER])

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LOOKUP_S):
            while due := [peer for peer in sorted(known, key=distance)[:NEAREST] if peer not in asked]:
                asked.update(due)
                await asyncio.gather(*(one(known[peer]) for peer in due))
    return dict(sorted(answers.items(), key=lambda item: distance(item[0].peer)))


def merged(lists: Iterable[tuple[bytes, ...]]) -> tuple[bytes, ...]:
    """Different records of all lists in turn, so that one peer that answers with many crowds out no other."""
    turns = itertools.zip_longest(*lists)
    found = dict.fromkeys(record for turn in turns for record in turn if record is not None)
    return tuple(found)[:RECORDS_PER_KEY]
