"""The NAT wire: ask a connected peer, and answer peers that ask. Wire: docs/wires/nat.md.

What we answer costs little: dial-backs go only to the outside IP that we see the asker at, a few a minute; summons
are signed by the peer that wants us, and we dial a few such peers at a time.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atoll.p2p.host.endpoint import endpoint_of
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.host.maddrs import legal_maddrs
from atoll.p2p.nat.rate_limit import PeerRateLimit
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
from atoll.protocols.nat import (
    MADDRS,
    NAT_MAX_BYTES,
    Answer,
    Ask,
    Coming,
    DialBack,
    Look,
    NatRefused,
    Punch,
    Reach,
    Reached,
    Seen,
    Summons,
    check_punch,
    decode_answer,
    decode_ask,
    peer_named,
    printable,
    refused,
)
from atoll.protocols.wires import NAT

log = logging.getLogger(__name__)

PROTOCOL = NAT.protocol(1)
ASK_S = 5.0
"""An ask whose answer does not come by then has failed; a dial-back takes most of it."""
ASKS_PER_MINUTE = 60
"""Looks of one peer that are answered, and as many punches, and as many summons; more are refused."""
DIAL_BACKS_PER_MINUTE = 12
"""Dial-backs of one peer: each makes us send packets to its address."""
PROBES_AT_ONCE = 64
"""Addresses that are probed at one time, for all peers."""
_NONCES = 4096
A = TypeVar("A")
Probe = Callable[[str], Coroutine[None, None, bool]]
"""Does a libp2p node answer at this multiaddr?"""


async def ask(host: Host, peer: PeerId, message: Ask, kind: type[A]) -> A:
    """The answer of a directly connected peer. Raises Unreachable, also for a refusal and for nonsense."""
    try:
        async with asyncio.timeout(ASK_S):
            stream = await host.open_stream(peer, PROTOCOL)
            try:
                await write_frame(stream, codec.encode(message))
                answer = decode_answer(await read_frame(stream, NAT_MAX_BYTES))
                await stream.close()
            finally:
                stream.reset()
    except (TimeoutError, DecodeError) as error:
        raise Unreachable(f"{short(peer)} gave no answer: {error}") from error
    if isinstance(answer, NatRefused):
        raise Unreachable(f"{short(peer)}: {printable(answer.reason)}")
    if not isinstance(answer, kind):
        raise Unreachable(f"{short(peer)} answered {type(answer).__name__} to {type(message).__name__}")
    return answer


class NatNode(Protocol):
    """What the answers need to know of the node they speak for."""

    def reach(self) -> Reach:
        """How we may be reached."""

    def relays(self) -> bool:
        """Whether we relay for others."""

    def claims(self) -> tuple[str, ...]:
        """Addresses at which anybody may dial us."""

    def dial_soon(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        """Dial `peer` now, in the background. Raises Unreachable when we do not want to.

        `is_hole`: both sides are behind NATs.
        """


@dataclass(frozen=True, slots=True)
class Clocks:
    """Time as the caller wants it."""

    now: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class NatServer:
    """Serves the NAT wire on `host`."""

    def __init__(
        self,
        host: Host,
        run: RunId,
        node: NatNode,
        probe: Probe,
        is_outside: Callable[[str], bool],
        clocks: Clocks,
    ) -> None:
        """`probe`: how a dial-back is made. `is_outside`: see RouteOptions."""
        self._host, self._run, self._node, self._clocks = host, run, node, clocks
        self._probe, self._is_outside, self._probing = probe, is_outside, 0
        per_minute = {Look: ASKS_PER_MINUTE, Punch: ASKS_PER_MINUTE, Summons: ASKS_PER_MINUTE}
        self._allowances = {
            kind: PeerRateLimit(count, clocks.now)
            for kind, count in {**per_minute, DialBack: DIAL_BACKS_PER_MINUTE}.items()
        }
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        host.set_handler(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(2 * ASK_S):
                question = decode_ask(await read_frame(stream, NAT_MAX_BYTES))
                answer = await self._answer(stream.peer, question)
                await write_frame(stream, codec.encode(answer))
        except TimeoutError as error:
            raise Unreachable("the peer neither asks nor listens") from error

    async def _answer(self, peer: PeerId, question: Ask) -> Answer:
        run = question.punch.run if isinstance(question, Summons) else question.run
        if run != self._run:
            return refused("another run")
        if not self._allowances[type(question)].take(peer):
            return refused("too many asks")
        match question:
            case Look():
                return Seen(
                    *(await self._seen(peer), self._node.reach(), self._node.relays(), self._clocks.unix())
                )
            case DialBack():
                return await self._dial_back(peer, question.maddrs)
            case Punch():
                return await self._rendezvous(peer, question)
            case Summons():
                return self._summoned(question)

    async def _seen(self, peer: PeerId) -> tuple[str, ...]:
        live = [c.maddr for c in await self._host.connections() if c.peer == peer]
        return legal_maddrs(dict.fromkeys(live))[:MADDRS]

    async def _dial_back(self, peer: PeerId, maddrs: tuple[str, ...]) -> Answer:
        seen = await self._seen(peer)
        ips = {e.ip for maddr in seen if (e := endpoint_of(maddr)) is not None}
        own = [m for m in legal_maddrs(maddrs) if m in seen or ((e := endpoint_of(m)) and e.ip in ips)]
        # Not inside our own network, and not our own machine: nobody probes those through us.
        wanted = [maddr for maddr in dict.fromkeys(own) if self._is_outside(maddr)]
        if self._probing + len(wanted) > PROBES_AT_ONCE:
            return refused("too many dial-backs at once")
        self._probing += len(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                probes = {maddr: group.create_task(self._probe(maddr)) for maddr in wanted}
        finally:
            self._probing -= len(wanted)
        return Reached(tuple(maddr for maddr, probe in probes.items() if probe.result()))

    async def _rendezvous(self, peer: PeerId, punch: Punch) -> Answer:
        """Both are connected to us: bring them together."""
        target = peer_named(punch.target)
        if check_punch(punch) != peer:
            raise DecodeError("a punch that somebody else signed")
        if target == peer:
            return refused("a punch to its own end")
        theirs = await self._seen(target)
        if not theirs:
            return refused(f"{short(target)} is not here")
        try:
            coming = await ask(self._host, target, Summons(punch, await self._seen(peer)), Coming)
        except Unreachable as error:
            return refused(str(error))
        return Coming(coming.claims, theirs)

    def _summoned(self, summons: Summons) -> Answer:
        """A rendezvous says that somebody wants to meet us now."""
        punch = summons.punch
        try:
            source = check_punch(punch)
        except PeerFault as fault:
            return refused(str(fault))
        if punch.target != self._host.peer_id or not self._is_new(punch.nonce):
            return refused("not for me, or an old one")
        claims = self._node.claims()[:MADDRS]
        places = meeting_places(punch.claims, summons.seen, bool(claims))
        try:
            self._node.dial_soon(source, places, is_hole=not claims and not punch.claims)
        except Unreachable as error:
            return refused(str(error))
        return Coming(claims, ())

    def _is_new(self, nonce: bytes) -> bool:
        if nonce in self._nonces:
            return False
        self._nonces[nonce] = None
        if len(self._nonces) > _NONCES:
            self._nonces.popitem(last=False)
        return True


def meeting_places(claims: tuple[str, ...], seen: tuple[str, ...], we_are_public: bool) -> tuple[str, ...]:
    """Where to dial the other side of a punch.

    Between two NATs only QUIC: with TCP both sides become Noise initiators, and both give up. A side that anybody
    may dial is dialled at its claims, by every transport. What a rendezvous sees are IP addresses, never names.
    """
    addresses = (maddr for maddr in seen if endpoint_of(maddr) is not None or maddr.startswith("/memory/"))
    both = legal_maddrs(dict.fromkeys((*claims, *addresses)))
    if claims or we_are_public:
        return both
    return tuple(maddr for maddr in both if maddr.endswith("/quic-v1") or maddr.startswith("/memory/"))
