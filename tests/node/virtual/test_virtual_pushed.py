"""A small payload comes with the record that names it: whole nodes on virtual time ask nobody for one."""

from atoll.p2p.blobs.fetch import BlobFetcher
from atoll.p2p.blobs.pushed import PushedBlobs
from atoll.p2p.transports.memory.virtual_time import run_virtual

ROUNDS, MEMBERS = 6, 4


def asked_for(world, monkeypatch) -> int:
    """Downloads that nodes began until all rounds were final; each node has checked each set."""
    asked: list[bytes] = []
    download = BlobFetcher._download

    async def counted(self, blob, holders, max_bytes) -> None:
        asked.append(blob)
        await download(self, blob, holders, max_bytes)

    monkeypatch.setattr(BlobFetcher, "_download", counted)

    async def story() -> None:
        async with world(ROUNDS, MEMBERS) as w:
            for number in range(MEMBERS):
                w.start(number)
            await w.until(w.all_final)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())
    return len(asked)


def test_nobody_asks_for_a_payload_that_came_with_its_record(world, monkeypatch):
    assert asked_for(world, monkeypatch) == 0


def test_who_gets_none_asks_as_before(world, monkeypatch):
    monkeypatch.setattr(PushedBlobs, "send_payload_of", lambda *_: None)
    assert asked_for(world, monkeypatch) >= (ROUNDS - 1) * MEMBERS * (MEMBERS - 1)
