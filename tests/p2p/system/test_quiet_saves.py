"""What a disk refuses again and again is one line."""

import asyncio
import random
from datetime import datetime
from pathlib import Path

import pytest

from atoll.p2p.discovery.discovery import Discovery
from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.limits.monthly_quota import Month
from atoll.p2p.system.atomic_files import write_whole
from atoll.p2p.system.quiet_saves import QuietSaves
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DiskFault
from atoll.protocols.identity import Identity

NOON = datetime(2026, 11, 21, 12)


def test_a_refusal_is_told_once_until_it_works_or_another_comes(caplog: pytest.LogCaptureFixture) -> None:
    saves = QuietSaves("it is not saved")

    def refuse(why: str) -> None:
        if why:
            raise DiskFault(why)

    done = [saves.does(lambda why=why: refuse(why)) for why in ("full", "full", "", "full", "torn", "torn")]
    assert done == [False, False, True, False, False, False]
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"it is not saved: {DiskFault(why).line()}" for why in ("full", "full", "torn")]


def test_a_node_whose_disk_is_full_does_not_say_so_each_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("peers", "month"):
        (tmp_path / name).mkdir()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        inner = MemoryNetwork(seed=1).host(Identity(b"\x01" * 32).peer_id)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("atoll.p2p.limits.limited_host.load_month", lambda *given: Month("2026-10-01", 0, 0))
            host = LimitedHost(inner, read_limits(LimitsConfig()), tmp_path / "month", local_now=lambda: NOON)
        found = Discovery(inner, (), tmp_path / "peers", now=loop.time, rng=random.Random(1))
        found.book.save = lambda path: write_whole(path, b"")  # an empty book is not saved
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(host.serve(lambda: None)), group.create_task(found.serve())]
            await asyncio.sleep(600)
            for task in tasks:
                task.cancel()

    run_virtual(main())
    assert caplog.text.count("this month's traffic is not saved") == 1
    assert caplog.text.count("the cache of peers is not saved") == 1
