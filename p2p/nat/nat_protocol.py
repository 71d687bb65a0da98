"""The NAT wire: requests to a connected peer, and the server that answers them. Wire: docs/wires/nat.md.

Answers cost little: dial-backs go only to the outside IP at which we see the peer, a few a minute; summons are
signed by the peer that wants us, and we dial a few such peers at a time.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, Stream
from atoll.p2p.host.maddrs import endpoint_of, legal_maddrs
from atoll.p2p.limits.bounded_table import put_newest
from atoll.p2p.limits.token_bucket import PeerRateLimit
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
REQUEST_S = 5.0
"""A request without an answer by then has failed; a dial-back takes most of it."""
REQUESTS_PER_MINUTE = 60
"""Looks of one peer that are answered, and as many punches, and as many summons; more are refused."""
DIAL_BACKS_PER_MINUTE = 12
"""Dial-backs of one peer that are answered: each makes us send packets to its address."""
PROBES_AT_ONCE = 64
"""Addresses that are probed at one time, for all peers."""
_NONCES = 4096
A = TypeVar("A")
Probe = Callable[[str], Coroutine[None, None, bool]]
"""Whether a libp2p node answers at a multiaddr."""


async def request(host: Host, peer: PeerId, message: Ask, kind: type[A]) -> A:
    """Send `message` to a connected peer and return its answer. Raises Unreachable, also for a refusal."""
    try:
        async with asyncio.timeout(REQUEST_S):
            stream = await host.open_stream(peer, PROTOCOL)
            try:
                await write_frame(stream, codec.encode(message))
                answer = decode_answer(await read_frame(stream, NAT_MAX_BYTES))
                await stream.close()
            finally:
                stream.reset()
    # A peer that answers nonsense is no use here, and the next one is asked: its fault is not reported.
    except (TimeoutError, DecodeError) as error:
        raise Unreachable(f"{short(peer)} gave no answer: {error}") from error
    if isinstance(answer, NatRefused):
        raise Unreachable(f"{short(peer)}: {printable(answer.reason)}")
    if not isinstance(answer, kind):
        raise Unreachable(f"{short(peer)} answered {type(answer).__name__} to {type(message).__name__}")
    return answer


class NatNode(Protocol):
    """The node for which a NatServer answers."""

    def reach(self) -> Reach:
        """How we may be reached."""

    def is_relay(self) -> bool:
        """Whether we relay for others."""

    def public_addresses(self) -> tuple[str, ...]:
        """Addresses at which anybody may dial us; empty behind a NAT."""

    def schedule_dial(self, peer: PeerId, maddrs: tuple[str, ...], *, is_hole: bool) -> None:
        """Dial `peer` now, in the background. Raises Unreachable when the node refuses to.

        `is_hole`: both sides are behind NATs.
        """


@dataclass(frozen=True, slots=True)
class Clocks:
    """Sources of time, replaced in simulations."""

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
        self._host = host
        self._run = run
        self._node = node
        self._clocks = clocks
        self._probe = probe
        self._is_outside = is_outside
        self._probing = 0
        # One budget for each kind: a flood of looks must not use up the punches of the same peer.
        self._rate_limits: dict[type[Ask], PeerRateLimit] = {
            kind: PeerRateLimit(REQUESTS_PER_MINUTE, clocks.now) for kind in (Look, Punch, Summons)
        }
        self._rate_limits[DialBack] = PeerRateLimit(DIAL_BACKS_PER_MINUTE, clocks.now)
        self._nonces: OrderedDict[bytes, None] = OrderedDict()
        host.set_handler(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        try:
            # Twice the requester's patience: a punch waits here for the answer of its target.
            async with asyncio.timeout(2 * REQUEST_S):
                question = decode_ask(await read_frame(stream, NAT_MAX_BYTES))
                answer = await self._answer(stream.peer, question)
                await write_frame(stream, codec.encode(answer))
        except TimeoutError as error:
            raise Unreachable("the peer neither asks nor listens") from error

    async def _answer(self, peer: PeerId, question: Ask) -> Answer:
        run = question.punch.run if isinstance(question, Summons) else question.run
        if run != self._run:
            return refused("another run")
        if not self._rate_limits[type(question)].take(peer):
            return refused("too many asks")
        match question:
            case Look():
                return Seen(
                    maddrs=await self._observed(peer),
                    reach=self._node.reach(),
                    relays=self._node.is_relay(),
                    unix_s=self._clocks.unix(),
                )
            case DialBack():
                return await self._dial_back(peer, question.maddrs)
            case Punch():
                return await self._bring_together(peer, question)
            case Summons():
                return self._answer_summons(question)

    async def _observed(self, peer: PeerId) -> tuple[str, ...]:
        """Remote addresses of the connections with `peer`."""
        live = [c.maddr for c in await self._host.connections() if c.peer == peer]
        return legal_maddrs(dict.fromkeys(live))[:MADDRS]

    async def _dial_back(self, peer: PeerId, maddrs: tuple[str, ...]) -> Answer:
        observed = await self._observed(peer)
        ips = {e.ip for maddr in observed if (e := endpoint_of(maddr)) is not None}
        # Only the requester's own IP: otherwise anybody could make us send packets to a victim.
        own = [m for m in legal_maddrs(maddrs) if m in observed or ((e := endpoint_of(m)) and e.ip in ips)]
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

    async def _bring_together(self, peer: PeerId, punch: Punch) -> Answer:
        """Answer as the rendezvous of `peer` and its target, which are both connected to us."""
        target = peer_named(punch.target)
        # The signature binds source and target: a rendezvous cannot make peers dial whom it likes.
        if check_punch(punch) != peer:
            raise DecodeError("a punch that somebody else signed")
        if target == peer:
            return refused("a punch to its own end")
        theirs = await self._observed(target)
        if not theirs:
            return refused(f"{short(target)} is not here")
        try:
            coming = await request(self._host, target, Summons(punch, await self._observed(peer)), Coming)
        except Unreachable as error:
            return refused(str(error))
        return Coming(coming.claims, theirs)

    def _answer_summons(self, summons: Summons) -> Answer:
        """Answer a rendezvous that passes on a punch to us: we dial its source now."""
        punch = summons.punch
        try:
            source = check_punch(punch)
        except PeerFault as fault:
            return refused(str(fault))
        if punch.target != self._host.peer_id or not self._is_new(punch.nonce):
            return refused("not for me, or an old one")
        ours = self._node.public_addresses()[:MADDRS]
        maddrs = punch_addresses(punch.claims, summons.seen)
        try:
            # In the background, so that the answer, which makes the source dial, leaves at the same moment.
            self._node.schedule_dial(source, maddrs, is_hole=not ours and not punch.claims)
        except Unreachable as error:
            return refused(str(error))
        return Coming(ours, ())

    def _is_new(self, nonce: bytes) -> bool:
        if nonce in self._nonces:
            return False
        put_newest(self._nonces, nonce, None, _NONCES)
        return True


def punch_addresses(claims: tuple[str, ...], seen: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses at which to dial the other side of a punch.

    `claims`: where that side says that anybody may dial it. `seen`: where the rendezvous sees it.
    """
    # What a rendezvous sees are IP addresses. A name would make us ask a resolver of its choice. Only QUIC leaves
    # from where a node listens: a dial by TCP has a port of its own, at which nobody answers.
    observed = (maddr for maddr in seen if _is_quic(maddr) or maddr.startswith("/memory/"))
    return legal_maddrs(dict.fromkeys((*claims, *observed)))


def _is_quic(maddr: str) -> bool:
    return maddr.endswith("/quic-v1") and endpoint_of(maddr) is not None
