"""The newest leases on disk: what one start has seen is old for the next, and no disk fault ends a node."""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.p2p.membership.kept_leases import KeptLeases
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.registers import Lease, sign_register

RUN = RunId(digest(b"run"))
ME, OTHER = (Identity(bytes([number]) * 32) for number in (1, 2))


def lease(seq: int) -> bytes:
    return codec.encode(sign_register(RUN, OTHER, 1, seq, 60.0, Lease("training", Round(seq), -1, b"", -1, 1.0)))


def started(path: Path, wall_s: Callable[[], float] = time.time) -> tuple[RegisterStore, KeptLeases]:
    registers = RegisterStore(RUN, ME, 1)
    return registers, KeptLeases(registers, path, wall_s)


def test_a_kill_loses_what_the_last_seconds_brought_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "leases"

    async def main() -> None:
        registers, kept = started(path)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(kept.serve())
            await asyncio.sleep(1)
            registers.merge(lease(4), 0.0)
            await asyncio.sleep(30)
            written = path.read_bytes() if path.exists() else b""
            registers.merge(lease(6), 0.0)
            serving.cancel()
        assert written, "while it runs, not only at its end"
        assert path.read_bytes() != written, "an end in good order saves them too"
        path.write_bytes(written)

    run_virtual(main())
    again, _ = started(path)
    assert not again.merge(lease(3), 0.0)
    assert again.merge(lease(5), 0.0)


@pytest.mark.parametrize("data", [b"", b"garbage", codec.encode((3, ())), codec.encode((1, (b"x" * 5000,)))])
def test_a_damaged_file_is_ignored_and_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    path = tmp_path / "leases"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        registers, kept = started(path)
    assert "is damaged" in caplog.text
    registers.merge(lease(1), 0.0)
    kept.save()
    again, _ = started(path)
    assert not again.merge(lease(0), 0.0)


def lived(path: Path, seconds: float, wall_s: float) -> float:
    """A life of so many seconds that ends in order; for how long the node was down before it."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        registers, kept = started(path, lambda: wall_s + loop.time())
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(kept.serve())
            await asyncio.sleep(seconds)
            registers.merge(lease(int(wall_s)), 0.0)
            serving.cancel()
        return kept.down_s

    return run_virtual(main())


def test_it_says_for_how_long_the_node_was_down(tmp_path: Path) -> None:
    path = tmp_path / "leases"
    assert lived(path, 100.0, 1000.0) == math.inf, "it never ran"
    assert started(path, lambda: 1130.0)[1].down_s == 30.0
    assert started(path, lambda: 999.0)[1].down_s == math.inf, "the clock was put back"
    assert lived(path, 5.0, 2000.0) == 900.0
    assert started(path, lambda: 2010.0)[1].down_s == 910.0, "it may not have met anybody in five seconds"
    path.write_bytes(codec.encode((1, (lease(1),))))
    assert started(path, lambda: 1130.0)[1].down_s == math.inf, "files of before do not say"


def test_a_disk_that_refuses_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registers, kept = started(tmp_path / "gone" / "leases")
    registers.merge(lease(1), 0.0)
    with caplog.at_level(logging.WARNING):
        kept.save()
        kept.save()
    assert caplog.text.count("the newest leases are not saved") == 1
    (tmp_path / "gone").mkdir()
    kept.save()
    assert (tmp_path / "gone" / "leases").exists(), "it is tried again"
