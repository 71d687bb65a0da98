"""Who takes an expert asks its worker for it now and then, until the worker has come to the round that does."""

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.node.daemon.coordinator.moment_transfer import REST_S, MomentTransfer
from atoll.node.daemon.core.interfaces import RunContext
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import digest
from atoll.protocols.local.worker_messages import InheritReply
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.moments import moments_bytes
from tests.node.worker.session_home import OTHER, SPEC

BLOB = digest(b"moments")
RUN = replace(SPEC, model=replace(SPEC.model, experts=ExpertsSpec(count=2, per_token=1, ffn=64)))


class Worker:
    """Its worker and its guard."""

    is_ready = True

    def __init__(self, takes_at_s):
        self._takes_at_s = takes_at_s
        self.asked, self.deleted, self.blamed = [], [], []

    def delete_blob(self, blob):
        self.deleted.append(blob)

    def blame(self, peer, error):
        self.blamed.append((peer, type(error)))

    async def ask(self, ask, kind):
        self.asked.append(now())
        return InheritReply(now() >= self._takes_at_s)


def now():
    return asyncio.get_running_loop().time()


class Net:
    def __init__(self, more_bytes=0):
        self.blob_bytes = moments_bytes(RUN.model, RUN.inner.optimizer) + more_bytes
        self.fetched = []

    def holdings(self):
        return {OTHER: SimpleNamespace(moments=((1, BLOB),))}

    def has_blob(self, blob):
        return blob in self.fetched

    def blob_path(self, blob):
        return f"/blobs/{blob.hex()}"

    async def fetch_blob(self, blob, holders, max_bytes):
        if self.blob_bytes > max_bytes:
            raise DecodeError("larger than legal")
        self.fetched.append(blob)


async def transfer(net, worker, looks=60):
    """Expert 1 comes; the transfer is looked at every quarter of a second."""
    async with asyncio.TaskGroup() as group:
        transfer = MomentTransfer(
            context=RunContext(RUN, OTHER, SimpleNamespace(event=lambda *_, **__: None), now),
            net=net,
            worker=worker,
            guard=worker,
            assignment=None,
            round_now=lambda: 4,
            start_task=lambda work, name: group.create_task(work, name=name),
        )
        transfer.on_assigned(bitmap_of({0}, 2), bitmap_of({1}, 2))
        for _ in range(looks):
            transfer.step()
            await asyncio.sleep(0.25)


def test_moments_above_their_legal_size_are_not_fetched_and_blamed():
    async def story():
        net, worker = Net(more_bytes=1), Worker(0.0)
        await transfer(net, worker)
        assert net.fetched == worker.asked == []
        assert worker.blamed == [(OTHER, DecodeError)]

    run_virtual(story())


def test_a_worker_that_is_not_there_yet_is_asked_again_after_a_rest():
    async def story():
        net = Net()
        worker = Worker(now() + 7.0)
        await transfer(net, worker)
        assert net.fetched == worker.deleted == [BLOB], "fetched once, and not kept when it was used"
        rests = [after - before for before, after in zip(worker.asked, worker.asked[1:], strict=False)]
        assert rests == pytest.approx([REST_S] * 4, abs=0.3)

    run_virtual(story())
