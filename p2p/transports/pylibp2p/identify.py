"""The answer to `/ipfs/id/1.0.0`: go-libp2p asks it on every new connection.

With it go-libp2p opens streams without asking for the protocol first, and learns its own observed address.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.io.exceptions import IOException
from libp2p.utils import encode_varint_prefixed
from multiaddr import Multiaddr

from atoll.p2p.transports.pylibp2p.yamux import Lane

IDENTIFY: Final = "/ipfs/id/1.0.0"
_ANSWER_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """The facts about us that a peer may know, and where we see it."""

    public_key: bytes
    maddrs: Sequence[str]
    observed: str
    protocols: Sequence[str]


async def introduce(lane: Lane, about: Introduction) -> None:
    """Send `about` and end the stream."""
    message = Identify(
        protocol_version="ipfs/0.1.0",
        agent_version="atoll",
        public_key=about.public_key,
        listen_addrs=[Multiaddr(maddr).to_bytes() for maddr in about.maddrs],
        observed_addr=Multiaddr(about.observed).to_bytes(),
        protocols=list(about.protocols),
    )
    try:
        with trio.move_on_after(_ANSWER_S):
            await lane.write(encode_varint_prefixed(message.SerializeToString()))
            await lane.finish()
            await lane.receive()
    except IOException:
        return
    finally:
        await lane.drop()
