"""Replaces a connection on which p2pd opens no more streams.

A QUIC stream that is cancelled while it waits for bytes may leave its place taken at the other side (`unix_socket`
says why). After some 300 of them go-libp2p waits for ever to open another one, while streams that are open go on,
and with them calls and all pings.
"""

import asyncio
import logging
from collections import OrderedDict

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.host.maddrs import MADDRS_PER_PEER, is_of_dial
from atoll.p2p.limits.bounded_table import put_newest
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)
OPEN_S = 5.0
"""Seconds that a stream may take to open; then its connection takes no more streams, and is replaced."""
_DIALLED = 256
"""Peers whose dialled addresses are remembered, the newest ones."""


class ConnectionReplacements:
    """Remembers when the connections of a peer were replaced, so that streams that hang together do it once."""

    def __init__(self) -> None:
        self._at_s: dict[PeerId, float] = {}
        self._dialled: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def on_dialled(self, address: PeerAddress) -> None:
        """Remember the addresses with which a peer was reached."""
        put_newest(self._dialled, address.peer, address.maddrs, _DIALLED)

    async def replace(self, host: Host, peer: PeerId, began_s: float) -> None:
        """Replace connections on which a stream wanted since `began_s` did not open. Raises Unreachable."""
        now_s = asyncio.get_running_loop().time()
        if self._at_s.get(peer, began_s) > began_s:
            return  # another stream that hung replaced them meanwhile
        self._at_s = {other: at_s for other, at_s in self._at_s.items() if now_s - at_s < OPEN_S}
        self._at_s[peer] = now_s
        dialled = self._dialled.get(peer, ())
        live = (each.maddr for each in await host.connections() if each.peer == peer)
        # p2pd adds the addresses that the peer itself names.
        known = dict.fromkeys((*(maddr for maddr in live if is_of_dial(maddr, dialled)), *dialled))
        log.warning("%s: the connection takes no more streams: it is replaced", short(peer))
        await host.disconnect(peer)
        await host.connect(PeerAddress(peer, tuple(known)[:MADDRS_PER_PEER]))
