"""Hole punching: a rendezvous that both sides are connected to tells each the other's address; both dial at once.

QUIC from the fixed listen port, so that the packets of one side open its router for the other's. Terms and idea:
libp2p DCUtR; ours needs one public peer, not four observers, and no relayed connection before it.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.nat.nat_calls import ask, meeting_places
from atoll.p2p.nat.race import first
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import Coming, sign_punch

log = logging.getLogger(__name__)

DIAL_S = 3.5
"""A punched dial takes a round trip or two; retransmissions of lost first packets are over by then."""
BACKOFF_S = 5.2
"""libp2p refuses to dial an address again within 5 s of a failure."""
TRIES = 2
STAGGER_S = 0.7
"""The next rendezvous is asked when the one before has not brought us together by then."""
_DIAL_FAILED = "punched dial failed"


class HoleShut(Unreachable):
    """The rendezvous worked, the hole did not open: worth another try after the back-off."""


class Puncher:
    """Asks for punches, and dials when summoned."""

    def __init__(
        self, host: Host, run: RunId, identity: Identity, claims: Callable[[], tuple[str, ...]], rng: random.Random
    ) -> None:
        """`claims`: addresses at which anybody may dial us; empty behind a NAT."""
        self._host, self._run, self._identity, self._claims, self._rng = host, run, identity, claims, rng

    async def punch(self, target: PeerId, rendezvous: Sequence[PeerId]) -> bool:
        """Connect to `target` with the help of one of `rendezvous`. Raises HoleShut, Unreachable.

        True if both sides are behind NATs: the connection is a punched one.
        """
        for attempt in range(TRIES):
            ways = {
                short(helper): (index * STAGGER_S, partial(self._once, target, helper))
                for index, helper in enumerate(rendezvous)
            }
            try:
                return await first(ways)
            except Unreachable as error:
                if _DIAL_FAILED not in str(error):
                    raise
                if attempt + 1 == TRIES:
                    raise HoleShut(str(error)) from error
            await asyncio.sleep(BACKOFF_S + self._rng.uniform(0.0, 0.5))
        raise Unreachable("no rendezvous")

    async def _once(self, target: PeerId, helper: PeerId) -> bool:
        claims = self._claims()
        wish = sign_punch(self._run, self._identity, target, self._rng.randbytes(16), claims)
        coming = await ask(self._host, helper, wish, Coming)
        maddrs = meeting_places(coming.claims, coming.seen, bool(claims))
        if not maddrs:
            raise Unreachable(f"{short(target)} cannot be punched: its network lets no UDP out")
        await self.dial(target, maddrs)
        return not claims and not coming.claims

    async def dial(self, target: PeerId, maddrs: Sequence[str]) -> None:
        """One side's half of the punch. Raises Unreachable."""
        try:
            async with asyncio.timeout(DIAL_S):
                await self._host.connect(PeerAddress(target, tuple(maddrs)))
        except (Unreachable, TimeoutError) as error:
            raise Unreachable(f"{_DIAL_FAILED} of {short(target)}: {error or 'no answer'}") from error
