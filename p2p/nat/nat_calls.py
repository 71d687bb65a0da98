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
from atoll.p2p.nat.rate_limit import Allowance
from atoll.protocols import codec
from atoll.protocols import nat as n
from atoll.protocols.errors import DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import PeerId, RunId, short
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


async def ask(host: Host, peer: PeerId, message: n.Ask, kind: type[A]) -> A:
    """The answer of a directly connected peer. Raises Unreachable, also for a refusal and for nonsense."""
    try:
        async with asyncio.timeout(ASK_S):
            stream = await host.open_stream(peer, PROTOCOL)
            try:
                await write_frame(stream, codec.encode(message))
                answer = n.decode_answer(await read_frame(stream, n.NAT_MAX_BYTES))
                await stream.close()
            finally:
                stream.reset()
    except (TimeoutError, DecodeError) as error:
        raise Unreachable(f"{short(peer)} gave no answer: {error}") from error
    if isinstance(answer, n.Refused):
        raise Unreachable(f"{short(peer)}: {n.printable(answer.reason)}")
    if not isinstance(answer, kind):
        raise Unreachable(f"{short(peer)} answered {type(answer).__name__} to {type(message).__name__}")
    return answer


class Node(Protocol):
    """What the answers need to know of the node they speak for."""

    def reach(self) -> n.Reach:
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


class Answers:
    """Serves the NAT wire on `host`."""

    def __init__(
        self, host: Host, run: RunId, node: Node, probe: Probe, is_outside: Callable[[str], bool], clocks: Clocks
    ) -> None:
        """`probe`: how a dial-back is made. `is_outside`: see RouteOptions."""
        self._host, self._run, self._node, self._clocks = host, run, node, clocks
        self._probe, self._is_outside, self._probing = probe, is_outside, 0
        per_minute = {n.Look: ASKS_PER_MINUTE, n.Punch: ASKS_PER_MINUTE, n.Summons: ASKS_PER_MINUTE}
        self._allowances = {
            kind: Allowance(count, clocks.now)
            for kind, count in {**per_minute, n.DialBack: DIAL_BACKS_PER_MINUTE}.items()
        }
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        host.set_handler(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(2 * ASK_S):
                question = n.decode_ask(await read_frame(stream, n.NAT_MAX_BYTES))
                answer = await self._answer(stream.peer, question)
                await write_frame(stream, codec.encode(answer))
        except TimeoutError as error:
            raise Unreachable("the peer neither asks nor listens") from error

    async def _answer(self, peer: PeerId, question: n.Ask) -> n.Answer:
        run = question.punch.run if isinstance(question, n.Summons) else question.run
        if run != self._run:
            return n.refused("another run")
        if not self._allowances[type(question)].take(peer):
            return n.refused("too many asks")
        match question:
            case n.Look():
                return n.Seen(
                    *(await self._seen(peer), self._node.reach(), self._node.relays(), self._clocks.unix())
                )
            case n.DialBack():
                return await self._dial_back(peer, question.maddrs)
            case n.Punch():
                return await self._rendezvous(peer, question)
            case n.Summons():
                return self._summoned(question)

    async def _seen(self, peer: PeerId) -> tuple[str, ...]:
        live = [c.maddr for c in await self._host.connections() if c.peer == peer]
        return legal_maddrs(dict.fromkeys(live))[: n.MADDRS]

    async def _dial_back(self, peer: PeerId, maddrs: tuple[str, ...]) -> n.Answer:
        seen = await self._seen(peer)
        ips = {e.ip for maddr in seen if (e := endpoint_of(maddr)) is not None}
        own = [m for m in legal_maddrs(maddrs) if m in seen or ((e := endpoint_of(m)) and e.ip in ips)]
        # Not inside our own network, and not our own machine: nobody probes those through us.
        wanted = [maddr for maddr in dict.fromkeys(own) if self._is_outside(maddr)]
        if self._probing + len(wanted) > PROBES_AT_ONCE:
            return n.refused("too many dial-backs at once")
        self._probing += len(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                probes = {maddr: group.create_task(self._probe(maddr)) for maddr in wanted}
        finally:
            self._probing -= len(wanted)
        return n.Reached(tuple(maddr for maddr, probe in probes.items() if probe.result()))

    async def _rendezvous(self, peer: PeerId, punch: n.Punch) -> n.Answer:
        """Both are connected to us: bring them together."""
        target = n.peer_named(punch.target)
        if n.check_punch(punch) != peer:
            raise DecodeError("a punch that somebody else signed")
        if target == peer:
            return n.refused("a punch to its own end")
        theirs = await self._seen(target)
        if not theirs:
            return n.refused(f"{short(target)} is not here")
        try:
            coming = await ask(self._host, target, n.Summons(punch, await self._seen(peer)), n.Coming)
        except Unreachable as error:
            return n.refused(str(error))
        return n.Coming(coming.claims, theirs)

    def _summoned(self, summons: n.Summons) -> n.Answer:
        """A rendezvous says that somebody wants to meet us now."""
        punch = summons.punch
        try:
            source = n.check_punch(punch)
        except PeerFault as fault:
            return n.refused(str(fault))
        if punch.target != self._host.peer_id or not self._is_new(punch.nonce):
            return n.refused("not for me, or an old one")
        claims = self._node.claims()[: n.MADDRS]
        places = meeting_places(punch.claims, summons.seen, bool(claims))
        try:
            self._node.dial_soon(source, places, is_hole=not claims and not punch.claims)
        except Unreachable as error:
            return n.refused(str(error))
        return n.Coming(claims, ())

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
