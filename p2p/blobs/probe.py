"""Asks a peer whether it has all of a blob, and takes no byte of it."""

from typing import cast

from atoll.p2p.blobs import frames
from atoll.p2p.blobs.holder_session import manifest_cap
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host
from atoll.protocols import codec
from atoll.protocols.blobs import decode_manifest
from atoll.protocols.ids import Digest, PeerId


async def offers_whole(host: Host, peer: PeerId, blob: Digest, max_bytes: int) -> bool:
    """Return whether `peer` offers every chunk of a blob of at most `max_bytes` now.

    False as well if it is busy. Raises Unreachable, DecodeError. The caller owns the deadline.
    """
    cap = frames.OFFER_OVERHEAD_BYTES + frames.HAVE_MAX_BYTES + manifest_cap(max_bytes)
    stream = await host.open_stream(peer, frames.PROTOCOL)
    try:
        await write_frame(stream, codec.encode(frames.Ask(blob, 0)))
        data = await read_frame(stream, cap)
        await stream.close()
    finally:
        stream.reset()
    answer = codec.decode(data, cast(type[frames.BlobOffer | frames.BlobRefusal], frames.Answer), max_bytes=cap)
    if not isinstance(answer, frames.BlobOffer):
        return False
    chunks = decode_manifest(answer.manifest, blob).chunks
    return frames.unpack_bits(answer.have, chunks) == (1 << chunks) - 1
