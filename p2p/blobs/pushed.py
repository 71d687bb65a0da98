"""Small blobs that come unasked: who publishes a record that names one sends it along, so nobody has to ask.

To ask costs a stream and a round trip or two, at which a round of a small model waits. What comes waits in memory
until it is wanted by its name. It is neither stored nor believed before, and whoever lacks it asks as always. So
losing one costs time only, and the table is bounded by dropping the oldest.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from atoll.p2p.blobs.fetch import Blobs
from atoll.p2p.limits.token_bucket import PeerRateLimit
from atoll.p2p.rpc.calls import Calls
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId, short
from atoll.protocols.ledger.records import Body, Contribution, SlicedContribution

PUSHED_MAX_BYTES = 64 * 1024
"""Largest blob that is sent unasked: larger ones would hold up the records behind them, and who has them already
would get much for nothing."""
WAITING_EACH = 4
"""Most blobs of one sender that wait: it is a round or two ahead at most."""
WAITING_BYTES = 4 * 1024 * 1024
"""Most bytes that wait, of all senders."""
_PER_MINUTE = 600
"""Blobs of one peer that are looked at: ten rounds a second."""
_BURST = 16
_METHOD = "blob.push"
_HEADER_BYTES = 8


class _Waiting(NamedTuple):
    sender: PeerId
    data: bytes


class PushedBlobs:
    """Sends small blobs to neighbours, and keeps what came until it is taken."""

    def __init__(self, calls: Calls, blobs: Blobs, now: Callable[[], float]) -> None:
        self._calls = calls
        self._blobs = blobs
        self._rate = PeerRateLimit(_PER_MINUTE, now, _BURST)
        self._waiting: OrderedDict[Digest, _Waiting] = OrderedDict()
        self._bytes = 0
        calls.register_notice(_METHOD, bytes, self._receive, max_bytes=PUSHED_MAX_BYTES + _HEADER_BYTES)

    def send_payload_of(self, body: Body, peers: Callable[[], Iterable[PeerId]]) -> None:
        """Send the payload that a contribution names to `peers`, before what is published next, if it is small.

        In runs whose rounds may be reduced most members never want it, so nothing is sent. Raises CorruptFault,
        DiskFault. It was written a moment ago, so reading it does not hold up the loop.
        """
        if not isinstance(body, Contribution) or isinstance(body, SlicedContribution):
            return
        store, blob = self._blobs.store, body.payload
        if not store.has(blob) or store.size(blob) > PUSHED_MAX_BYTES:
            return
        data = store.chunk(blob, 0)
        for peer in peers():
            self._calls.notify(peer, _METHOD, data)
            self._blobs.count_pushed(peer, up_bytes=len(data))

    async def take(self, blob: Digest, max_bytes: int) -> Path | None:
        """Store a blob that came, and return its file; None if it did not come.

        Raises DecodeError if it is larger than legal, DiskFault.
        """
        found = self._waiting.pop(blob, None)
        if found is None:
            return None
        self._bytes -= len(found.data)
        if len(found.data) > max_bytes:
            size = f"{len(found.data)} bytes where at most {max_bytes} are legal"
            raise DecodeError(f"blob {short(blob)} has {size}")
        await asyncio.to_thread(self._blobs.store.add_bytes, found.data)
        return self._blobs.store.path(blob)

    async def _receive(self, sender: PeerId, data: bytes) -> None:
        self._blobs.count_pushed(sender, down_bytes=len(data))
        if self._blobs.is_refused(sender) or not self._rate.take(sender):
            return
        # Its name is what it hashes to, so what is taken by a name is that blob, whoever sent it.
        blob = manifest_of_bytes(data).id
        if blob in self._waiting or self._blobs.store.has(blob):
            return
        own = [name for name, waiting in self._waiting.items() if waiting.sender == sender]
        if len(own) >= WAITING_EACH:
            self._drop(own[0])
        self._waiting[blob] = _Waiting(sender, data)
        self._bytes += len(data)
        while self._bytes > WAITING_BYTES:
            self._drop(next(iter(self._waiting)))

    def _drop(self, blob: Digest) -> None:
        self._bytes -= len(self._waiting.pop(blob).data)
