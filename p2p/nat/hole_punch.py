"""Hole punching: a rendezvous that both sides are connected to tells each the other's address; both dial at once.

QUIC from the fixed listen port, so that the packets of one side open its router for the other's. Terms and idea:
libp2p DCUtR; ours needs one public peer, not four observers, and no relayed connection before it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from atoll.p2p.host.interface import Host, PeerAddress, PeerConnected
from atoll.p2p.nat.candidates import Attempt, race
from atoll.p2p.nat.nat_protocol import punch_addresses, request
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import Coming, sign_punch

DIAL_S = 3.5
"""A punched dial takes a round trip or two; retransmissions of lost first packets are over by then."""
BACKOFF_S = 5.2
"""libp2p refuses to dial an address again within 5 s of a failure."""
TRIES = 2
STAGGER_S = 0.7
"""The next helper is asked when the one before has not brought us together by then."""
_DIAL_FAILED = "punched dial failed"
T = TypeVar("T")


class PunchFailed(Unreachable):
    """The rendezvous worked, the hole did not open: worth another try after the back-off."""


@dataclass(frozen=True, slots=True)
class HolePuncher:
    """Asks helpers for punches, and dials when a punch begins."""

    host: Host
    run: RunId
    identity: Identity
    public_addresses: Callable[[], tuple[str, ...]]
    """Where anybody may dial us; empty behind a NAT."""
    rng: random.Random

    async def punch(self, target: PeerId, helpers: Sequence[PeerId]) -> bool:
        """Connect to `target` with the help of one of `helpers`. Raises PunchFailed, Unreachable.

        Returns whether both sides are behind NATs, so that the connection is a punched one.
        """
        for attempt in range(TRIES):
            try:
                return await race(staggered(helpers, lambda helper: self._attempt(target, helper)))
            except Unreachable as error:
                # No helper brought us together: nothing was dialled, and dialling again would change nothing.
                if _DIAL_FAILED not in str(error):
                    raise
                if attempt + 1 == TRIES:
                    raise PunchFailed(str(error)) from error
            # The random part keeps two nodes that failed together from colliding at every later try.
            await asyncio.sleep(BACKOFF_S + self.rng.uniform(0.0, 0.5))
        raise Unreachable("no rendezvous")

    async def _attempt(self, target: PeerId, helper: PeerId) -> bool:
        ours = self.public_addresses()
        # The nonce lets the target refuse a helper that replays this punch later.
        punch = sign_punch(self.run, self.identity, target, self.rng.randbytes(16), ours)
        coming = await request(self.host, helper, punch, Coming)
        maddrs = punch_addresses(coming.claims, coming.seen)
        if not (maddrs or ours):
            raise Unreachable(f"{short(target)} cannot be punched: its network lets no UDP out")
        # At once, without a countdown: the target dials since its answer left, so our packets cross on the way.
        # QUIC repeats its first packet, so that an early one dropped by the other router costs a retransmission.
        await self.dial(target, maddrs)
        return not ours and not coming.claims

    async def dial(self, target: PeerId, maddrs: Sequence[str]) -> None:
        """Dial our half of the punch; without an address wait for the other half. Raises Unreachable."""
        try:
            async with asyncio.timeout(DIAL_S):
                if maddrs:
                    await self.host.connect(PeerAddress(target, tuple(maddrs)), DIAL_S)
                else:
                    await self._arrival(target)
        except (Unreachable, TimeoutError) as error:
            raise Unreachable(f"{_DIAL_FAILED} of {short(target)}: {error or 'no answer'}") from error

    async def _arrival(self, target: PeerId) -> None:
        events = self.host.events()
        if target in {connection.peer for connection in await self.host.connections()}:
            return
        async for event in events:
            if event == PeerConnected(target):
                return
        raise Unreachable("this node is stopping")


def staggered(helpers: Iterable[PeerId], attempt: Callable[[PeerId], Awaitable[T]]) -> dict[str, Attempt[T]]:
    """One attempt for each helper; each gives the helper before it STAGGER_S."""
    return {
        short(helper): Attempt(index * STAGGER_S, partial(attempt, helper)) for index, helper in enumerate(helpers)
    }
