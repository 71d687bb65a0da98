"""Candidate addresses of a peer, and the race between the ways that could reach it. No I/O of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from atoll.p2p.host.maddrs import is_global, is_loopback
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import PeerId
from atoll.protocols.nat import peer_named

PUBLISHED = 16
"""Addresses of ours that peers are told."""
CIRCUITS = 4
"""Circuit addresses among them."""
_CIRCUIT = "/p2p-circuit"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CandidateAddresses:
    """Where a peer may be reached: addresses of its own, and peers that it is connected to."""

    direct: tuple[str, ...]
    through: Mapping[PeerId, tuple[str, ...]] = field(default_factory=dict)
    """Helper -> where the helper may be dialled; empty where the peer named no address of the helper."""


def split(maddrs: Sequence[str]) -> CandidateAddresses:
    """Separate direct addresses from circuit addresses (`…/p2p/RELAY/p2p-circuit`)."""
    direct = []
    through: dict[PeerId, tuple[str, ...]] = {}
    for maddr in maddrs:
        if not maddr.endswith(_CIRCUIT):
            direct.append(maddr)
            continue
        where, _, relay = maddr.removesuffix(_CIRCUIT).rpartition("/p2p/")
        try:
            helper = peer_named(relay)
        except DecodeError:
            continue  # its PeerID is no Ed25519 key, so it runs other software and does not speak our relay wire
        known = through.get(helper, ())
        through[helper] = (*known, where) if where and where not in known else known
    return CandidateAddresses(tuple(direct), through)


def circuits_through(dialled: Mapping[PeerId, str], relays: Collection[PeerId] = ()) -> tuple[str, ...]:
    """Our circuit addresses through public peers that we dialled at `dialled`; known relays come first."""
    # A helper that does not relay still counts: it can be the rendezvous of a hole punch.
    best = sorted(dialled.items(), key=lambda item: item[0] not in relays)
    return tuple(f"{maddr}/p2p/{peer}{_CIRCUIT}" for peer, maddr in best[:CIRCUITS])


def publishable(listen: Sequence[str], reached: Sequence[str], circuits: Sequence[str]) -> tuple[str, ...]:
    """Our addresses in the order in which others should try them: confirmed, circuits, then our own network's."""
    # Loopback is published only by a node that listens nowhere else: a swarm on one machine.
    own = [maddr for maddr in listen if not is_loopback(maddr)] or listen
    # A global listen address that no peer could dial back stays in: a firewall may let others through.
    ordered = (*reached, *filter(is_global, own), *circuits, *own)
    return tuple(dict.fromkeys(ordered))[:PUBLISHED]


class Attempt(NamedTuple, Generic[T]):
    """One way to a goal; it gives the others a head start of `delay_s`."""

    delay_s: float
    run: Callable[[], Awaitable[T]]


class _Won(Exception):
    """Ends the race: an error is what makes a task group cancel the attempts that are left."""


async def race(attempts: Mapping[str, Attempt[T]]) -> T:
    """Result of the first attempt that succeeds; the others are cancelled.

    Raises Unreachable with every attempt's name and failure.
    """
    reasons: dict[str, str] = {}
    won: list[T] = []
    running = len(attempts)
    # Set when only delayed attempts are left: there is nobody to give a head start to, so they begin at once.
    no_rivals = asyncio.Event()
    if all(delay_s for delay_s, _ in attempts.values()):
        no_rivals.set()

    async def enter(name: str, delay_s: float, run: Callable[[], Awaitable[T]]) -> None:
        nonlocal running
        try:
            async with asyncio.timeout(delay_s):
                await no_rivals.wait()
        except TimeoutError:
            pass
        try:
            won.append(await run())
        except Unreachable as error:
            reasons[name] = str(error)
        except TimeoutError:
            reasons[name] = "no answer in time"
        else:
            raise _Won
        running -= 1
        if running == sum(1 for other, (delay_s, _) in attempts.items() if delay_s and other not in reasons):
            no_rivals.set()

    try:
        async with asyncio.TaskGroup() as group:
            for name, (delay_s, run) in attempts.items():
                group.create_task(enter(name, delay_s, run))
    except* _Won:
        pass
    if won:
        # Two may succeed in one turn of the loop; the first is the result and the other is as good.
        return won[0]
    raise Unreachable("; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "no way to try")
