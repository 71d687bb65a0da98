"""A node whose peers lack old records asks for a certified summary, whether it worked here before or not."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon.assets.comparing import ALONE_S, wait_synced
from atoll.p2p.transports.memory.virtual_time import run_virtual


@pytest.mark.parametrize("worked", [False, True])
@pytest.mark.parametrize("gone", ["", "keeps recent records only"])
def test_a_summary_is_asked_for_where_records_are_gone_and_nowhere_else(worked, gone):
    async def story() -> None:
        synced, asked, said = asyncio.Event(), [], []
        swarm = SimpleNamespace(
            wait_synced=synced.wait,
            replication=SimpleNamespace(records_gone=gone, lacks_own_entries=False),
        )

        async def bring() -> None:
            asked.append(asyncio.get_running_loop().time())

        listener = SimpleNamespace(on_alone=said.append, on_behind=said.append)
        async with asyncio.TaskGroup() as group:
            group.create_task(wait_synced(swarm, listener, bring, worked=worked))
            await asyncio.sleep(ALONE_S * 2.5)
            synced.set()
        # Who worked here goes on alone after the first wait; a newcomer asks again.
        assert len(asked) == (0 if not gone else 1 if worked else 2)

    run_virtual(story())
