"""Inbound streams: how many of them are admitted, and a handler run so that its errors do not reach the host.

Good return: the stream is closed in good order. Anything else: it is reset. PeerFault goes to `on_fault`.
"""

import logging
from collections import Counter
from collections.abc import Callable

from atoll.p2p.host.interface import Handler, Stream
from atoll.protocols.errors import PeerFault, Unreachable
from atoll.protocols.ids import PeerId, short

log = logging.getLogger(__name__)

OnFault = Callable[[PeerId, PeerFault], None]

STREAMS_PER_PEER = 64
"""Inbound streams of one peer at one time; more are reset."""
STREAMS_IN_ALL = 2048
"""Inbound streams of all peers at one time; more are reset."""
LINGER_S = 10.0
"""A responder that closes waits this long for the initiator's end."""
LINGER_BYTES = 4 * 1024 * 1024
"""… and discards at most so many bytes."""


def log_fault(peer: PeerId, fault: PeerFault) -> None:
    """Log a fault of a peer; for hosts that keep no reputation."""
    log.warning("peer %s: %s", short(peer), fault.line())


async def run_handler(stream: Stream, handler: Handler, on_fault: OnFault) -> None:
    """Run `handler` on `stream` and end the stream. Raises nothing but a cancellation."""
    try:
        await handler(stream)
        await stream.close()
    except Unreachable as error:
        log.debug("stream %s of %s ended: %s", stream.protocol, short(stream.peer), error)
    except PeerFault as fault:
        on_fault(stream.peer, fault)
    except Exception:
        log.exception("handler of %s failed", stream.protocol)
    finally:
        stream.reset()


class Admission:
    """Counts inbound streams per peer, so that no peer uses up all of them."""

    def __init__(self) -> None:
        self._streams: Counter[PeerId] = Counter()
        self._total = 0

    def enter(self, peer: PeerId) -> bool:
        """Whether one more stream of `peer` may be served; if so it must `leave`."""
        if self._streams[peer] >= STREAMS_PER_PEER or self._total >= STREAMS_IN_ALL:
            return False
        self._streams[peer] += 1
        self._total += 1
        return True

    def leave(self, peer: PeerId) -> None:
        """Release the place of one stream of `peer`."""
        self._total -= 1
        self._streams[peer] -= 1
        if not self._streams[peer]:
            del self._streams[peer]
