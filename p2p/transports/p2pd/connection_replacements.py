"""Replaces a connection on which p2pd opens no more streams.

A QUIC stream that is cancelled while it waits for bytes may leave its place taken at the other side (`unix_socket`
says why). After some 300 of them go-libp2p waits for ever to open another one, while streams that are open go on,
and with them calls and all pings.
"""

import asyncio
import logging

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)
OPEN_S = 5.0
"""Seconds that a stream may take to open; then its connection takes no more streams, and is replaced."""


class ConnectionReplacements:
    """Remembers when the connections of a peer were replaced, so that streams that hang together do it once."""

    def __init__(self) -> None:
        self._at_s: dict[PeerId, float] = {}

    async def replace(self, host: Host, peer: PeerId, began_s: float) -> None:
        """Replace connections on which a stream wanted since `began_s` did not open. Raises Unreachable."""
        now_s = asyncio.get_running_loop().time()
        if self._at_s.get(peer, began_s) > began_s:
            return  # another stream that hung replaced them meanwhile
        self._at_s = {other: at_s for other, at_s in self._at_s.items() if now_s - at_s < OPEN_S}
        self._at_s[peer] = now_s
        maddrs = tuple(each.maddr for each in await host.connections() if each.peer == peer)
        log.warning("%s: the connection takes no more streams: it is replaced", short(peer))
        await host.disconnect(peer)
        await host.connect(PeerAddress(peer, maddrs))
