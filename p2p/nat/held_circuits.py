"""Relayed connections: to each peer that only a relay reaches, a circuit is held open and kept alive.

The held circuit tells both ends that the other is connected, and through which relay. Streams to the peer are
circuits of their own.
"""

import asyncio
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.nat.circuit import Prover, SecureStream, open_circuit
from atoll.protocols.errors import Unreachable
from atoll.protocols.ids import PeerId, RunId, short

log = logging.getLogger(__name__)

HOLD_PROTOCOL = "/atoll/hold/1"
BEAT_S = 2.5
SILENCE_S = 3.5
"""A beat unanswered for so long ends the held circuit: the relay, or the peer, is gone."""
STREAM_S = 4.0
"""A relay that brings no stream by then is dead; the next one is tried."""
_BEAT = b"\x01"


@dataclass(slots=True)
class HeldCircuit:
    """One held circuit to a peer."""

    relay: PeerId
    is_ours: bool
    """We opened it. Only that side tries to replace it, so that two upgrades do not run into each other."""


class HeldCircuits:
    """All held circuits of this node, and the streams opened beside them."""

    def __init__(self, host: Host, run: RunId, credentials: Prover, on_change: Callable[[PeerId], None]) -> None:
        """`on_change`: a peer got its first held circuit, or lost its last one."""
        self._host = host
        self._run = run
        self._credentials = credentials
        self._on_change = on_change
        self._held: dict[PeerId, dict[Stream, HeldCircuit]] = {}
        # Weak: a stream belongs to its user, and is listed here only to be reset when its relay dies.
        self._streams: weakref.WeakSet[SecureStream] = weakref.WeakSet()

    def peers(self) -> list[PeerId]:
        """Peers with a held circuit."""
        return list(self._held)

    def circuits_to(self, peer: PeerId) -> list[HeldCircuit]:
        """Held circuits to one peer, oldest first."""
        return list(self._held.get(peer, {}).values())

    async def open(self, peer: PeerId, relay: PeerId) -> SecureStream:
        """Open a circuit to `hold`. Raises Unreachable."""
        return await self._open(peer, relay, HOLD_PROTOCOL)

    def hold(self, stream: SecureStream) -> None:
        """Count the circuit as held from now on; `keep_alive` must follow."""
        self._add(stream, is_ours=True)

    async def keep_alive(self, stream: SecureStream) -> None:
        """Send beats until the held circuit breaks or `drop` ends it. Raises nothing but a cancellation."""
        try:
            while True:
                async with asyncio.timeout(SILENCE_S):
                    await stream.write(_BEAT)
                    await stream.read_exactly(len(_BEAT))
                await asyncio.sleep(BEAT_S)
        except (Unreachable, TimeoutError) as error:
            log.debug("the circuit held to %s ended: %s", short(stream.peer), error)
        finally:
            self._remove(stream)
            stream.reset()
        # The relay, or the peer, is gone: streams that go the same way are dead too, and would wait in vain.
        for other in tuple(self._streams):
            if (other.peer, other.relay) == (stream.peer, stream.relay):
                other.reset()

    async def answer(self, stream: Stream) -> None:
        """Handle HOLD_PROTOCOL inside circuits: send each beat back."""
        if not isinstance(stream, SecureStream):
            raise Unreachable("a circuit to hold came outside a circuit")
        self._add(stream, is_ours=False)
        try:
            while True:
                async with asyncio.timeout(BEAT_S + SILENCE_S):
                    await stream.write(await stream.read_exactly(len(_BEAT)))
        except TimeoutError as error:
            raise Unreachable("the held circuit fell silent") from error
        finally:
            self._remove(stream)

    def drop(self, peer: PeerId) -> None:
        """End all held circuits to a peer; streams beside them go on."""
        for stream in tuple(self._held.get(peer, ())):
            self._remove(stream)
            stream.reset()

    async def open_stream(self, peer: PeerId, protocol: str) -> SecureStream:
        """Open a stream through the first relay that brings one. Raises Unreachable with each relay's failure."""
        reasons = []
        for held in self.circuits_to(peer):
            try:
                async with asyncio.timeout(STREAM_S):
                    stream = await self._open(peer, held.relay, protocol)
            except Unreachable as error:
                reasons.append(str(error))
            except TimeoutError:
                reasons.append(f"relay {short(held.relay)}: no answer in {STREAM_S:.0f} s")
            else:
                self._streams.add(stream)
                return stream
        raise Unreachable("; ".join(reasons) or f"not connected to {short(peer)}")

    def reset_streams(self, peer: PeerId) -> None:
        """Reset all streams that we opened to `peer` through relays."""
        for stream in tuple(self._streams):
            if stream.peer == peer:
                stream.reset()

    async def _open(self, peer: PeerId, relay: PeerId, protocol: str) -> SecureStream:
        return await open_circuit(self._host, self._run, self._credentials, relay, peer, protocol)

    def _add(self, stream: SecureStream, *, is_ours: bool) -> None:
        is_first = stream.peer not in self._held
        self._held.setdefault(stream.peer, {})[stream] = HeldCircuit(stream.relay, is_ours)
        if is_first:
            self._on_change(stream.peer)

    def _remove(self, stream: Stream) -> None:
        held = self._held.get(stream.peer, {})
        # `drop` removes before the task that keeps the circuit alive does: only the first of the two reports it.
        if held.pop(stream, None) is not None and not held:
            del self._held[stream.peer]
            self._on_change(stream.peer)
