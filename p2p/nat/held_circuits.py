"""Relayed connections: to each peer that only a relay reaches, one circuit is held open and kept alive.

It tells both ends that the other is there, and who the relay is. Streams to the peer are circuits of their own.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.nat.circuit import open_circuit
from atoll.p2p.nat.circuit_stream import SecureStream
from atoll.p2p.nat.circuit_tls import Credentials
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId, short

log = logging.getLogger(__name__)

HOLD_PROTOCOL = "/atoll/hold/1"
BEAT_S = 2.5
SILENCE_S = 3.5
"""A beat unanswered for so long ends the hold: the relay, or the peer, is gone."""
_BEAT = b"\x01"


@dataclass(slots=True)
class Hold:
    """One held circuit."""

    relay: PeerId
    since: float
    is_ours: bool
    """We opened it; that side also tries to get rid of it by a punch."""


class Holds:
    """All held circuits of this node."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        credentials: Credentials,
        now: Callable[[], float],
        on_change: Callable[[PeerId], None],
    ) -> None:
        """`on_change`: a peer got its first hold, or lost its last one."""
        self._host, self._run, self._credentials, self._now = host, run, credentials, now
        self._on_change = on_change
        self._held: dict[PeerId, dict[Stream, Hold]] = {}

    def peers(self) -> list[PeerId]:
        """Peers with a hold."""
        return list(self._held)

    def of(self, peer: PeerId) -> list[Hold]:
        """Holds to one peer, oldest first."""
        return list(self._held.get(peer, {}).values())

    async def open(self, peer: PeerId, relay: PeerId) -> SecureStream:
        """A circuit to hold. Raises Unreachable."""
        return await open_circuit(self._host, self._run, self._credentials, relay, peer, HOLD_PROTOCOL)

    async def keep(self, stream: SecureStream) -> None:
        """Beat until the circuit breaks or `drop` ends it. Raises nothing but a cancellation."""
        self._enter(stream, is_ours=True)
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    await stream.write(_BEAT)
                    await stream.read_exactly(len(_BEAT))
                await asyncio.sleep(BEAT_S)
        except (Unreachable, TimeoutError) as error:
            log.debug("hold on %s ended: %s", short(stream.peer), error)
        finally:
            self._leave(stream)
            stream.reset()

    async def answer(self, stream: Stream) -> None:
        """Handler of HOLD_PROTOCOL inside circuits: send each beat back."""
        if not isinstance(stream, SecureStream):
            raise Unreachable("a hold outside a circuit")
        self._enter(stream, is_ours=False)
        try:
            while True:
                async with asyncio.timeout(BEAT_S + SILENCE_S):
                    await stream.write(await stream.read_exactly(len(_BEAT)))
        except TimeoutError as error:
            raise Unreachable("the hold fell silent") from error
        finally:
            self._leave(stream)

    def drop(self, peer: PeerId) -> None:
        """End all holds on a peer."""
        for stream in tuple(self._held.get(peer, ())):
            self._leave(stream)
            stream.reset()

    def _enter(self, stream: SecureStream, *, is_ours: bool) -> None:
        is_first = stream.peer not in self._held
        self._held.setdefault(stream.peer, {})[stream] = Hold(stream.relay, self._now(), is_ours)
        if is_first:
            self._on_change(stream.peer)

    def _leave(self, stream: Stream) -> None:
        held = self._held.get(stream.peer, {})
        if held.pop(stream, None) is not None and not held:
            del self._held[stream.peer]
            self._on_change(stream.peer)
