"""Fetches the invite that a short link names from the node that made it, before membership.

On one stream of the wire `invite`, the requester sends the invite's id (16 bytes) as a frame. The answer is one
frame with the long link as text, empty if the node does not have it (any more). The answer is not trusted: its
signature must be good, and its id the one of the short link.
"""

import asyncio
from collections.abc import Awaitable, Callable

from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.rpc.single_request import SingleRequests
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import PeerId, short
from atoll.protocols.run.invite import INVITE_ID_BYTES, LINK_MAX_CHARACTERS, ShortInvite, invite_id, read_invite
from atoll.protocols.wires import INVITE

FETCH_S = 15.0
"""Deadline for dial, request and answer together, in seconds."""
_ANSWER_S = 10.0


def serve_invites(host: Host, find: Callable[[bytes], Awaitable[str]]) -> None:
    """Answer requests for invites. `find` returns the long link with an id, empty without one."""

    async def answer(_peer: PeerId, asked: bytes) -> bytes:
        if len(asked) != INVITE_ID_BYTES:
            raise DecodeError(f"the id of an invite has {INVITE_ID_BYTES} bytes")
        return (await find(asked)).encode("ascii")

    _requests(host).set_handler(answer)


async def fetch_invite(host: Host, wanted: ShortInvite) -> str:
    """The long link that `wanted` stands for; empty if its node has it no more. Raises Unreachable, PeerFault."""
    try:
        async with asyncio.timeout(FETCH_S):
            await host.connect(PeerAddress(wanted.peer, wanted.maddrs))
            data = await _requests(host).ask(wanted.peer, wanted.id, LINK_MAX_CHARACTERS)
    except TimeoutError as error:
        raise Unreachable(f"no answer in {FETCH_S:.0f} s") from error
    if not data:
        return ""
    link = data.decode("ascii", "replace")
    if invite_id(read_invite(link)) != wanted.id:
        raise DecodeError(f"{short(wanted.peer)} gave another invite")
    return link


def _requests(host: Host) -> SingleRequests:
    return SingleRequests(host, INVITE.protocol(), INVITE_ID_BYTES, _ANSWER_S)
