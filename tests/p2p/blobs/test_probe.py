"""A question whether a peer has all of a blob moves no byte of it."""

from pathlib import Path

import pytest

from atoll.p2p.blobs.frames import PROTOCOL
from atoll.p2p.blobs.probe import offers_whole
from atoll.p2p.blobs.server import BlobServer
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.protocols import codec
from atoll.protocols.blobs import BLOB_CHUNK_BYTES
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.identity import Identity
from tests.p2p.blobs.test_blob_exchange import BLOB, CAP, DATA, MANIFEST, Lab, run


def test_a_holder_of_all_of_it_says_so_and_sends_nothing(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, server = await lab.honest()
        assert await offers_whole(lab.host, peer, BLOB, CAP)
        assert server.bytes_up.total() == 0

    run(tmp_path, scenario)


def test_a_part_of_it_is_not_all_of_it(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        store = BlobStore(tmp_path / "part")
        partial = store.begin(MANIFEST)
        partial.write(0, DATA[:BLOB_CHUNK_BYTES])
        peer = await lab.holder(lambda host: BlobServer(host, store))
        assert not await offers_whole(lab.host, peer, BLOB, CAP)
        store.suspend(partial)

    run(tmp_path, scenario)


def test_a_peer_without_it_does_not_offer_it(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, _ = await lab.honest(b"another one")
        assert not await offers_whole(lab.host, peer, BLOB, CAP)

    run(tmp_path, scenario)


def test_more_questions_in_a_row_than_streams_are_allowed_at_once(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        peer, _ = await lab.honest()
        assert [await offers_whole(lab.host, peer, BLOB, CAP) for _ in range(12)] == [True] * 12

    run(tmp_path, scenario)


@pytest.mark.parametrize("answer", [b"\xc1", codec.encode(("offer", b"no manifest", b"")), bytes(1 << 16)])
def test_an_illegal_answer_is_a_fault(tmp_path: Path, answer: bytes) -> None:
    async def scenario(lab: Lab) -> None:
        async def handle(stream):
            await read_frame(stream, 1 << 10)
            await write_frame(stream, answer)

        peer = await lab.holder(lambda host: host.set_handler(PROTOCOL, handle))
        with pytest.raises(DecodeError):
            await offers_whole(lab.host, peer, BLOB, CAP)

    run(tmp_path, scenario)


def test_nobody_is_unreachable(tmp_path: Path) -> None:
    async def scenario(lab: Lab) -> None:
        with pytest.raises(Unreachable):
            await offers_whole(lab.host, Identity(bytes([99]) * 32).peer_id, BLOB, CAP)

    run(tmp_path, scenario)
