"""The pipe to a worker: a reader that ends anywhere leaves it as the next one needs it."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.ipc.framing import frame
from atoll.node.ipc.worker_pipe import WorkerPipe
from atoll.protocols.local.worker_messages import ReplyEnvelope, ReportReply, SaveReply, TimeSpent
from tests.waiting import HANGS_S

REPLIES = (
    ReplyEnvelope(1, SaveReply(), TimeSpent(wait_ns=7)),
    ReplyEnvelope(2, ReportReply(), TimeSpent(fold_ns=3)),
)
DATA = b"".join(map(frame, REPLIES))


@pytest.mark.parametrize("at", range(len(DATA)))
async def test_a_read_that_is_cancelled_anywhere_loses_nothing(at):
    stdout = asyncio.StreamReader()
    pipe = WorkerPipe(SimpleNamespace(stdout=stdout, returncode=None))  # type: ignore[arg-type]
    found = []

    async def read() -> None:
        while True:
            found.append(await pipe.read())

    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        first = group.create_task(read())
        stdout.feed_data(DATA[:at])
        for _ in range(5):
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        stdout.feed_data(DATA[at:])
        while len(found) < 2:
            found.append(await pipe.read())
    assert found == list(REPLIES)
