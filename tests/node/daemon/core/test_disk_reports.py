"""A disk that refuses for hours fills no log: one line a minute for each kind of refusal."""

import errno
import json
from collections import Counter
from pathlib import Path

import pytest

from atoll.node.daemon.core.runtime import FaultGuard
from atoll.node.daemon.telemetry.round_log import RoundLog
from atoll.p2p.system.atomic_files import disk_fault
from atoll.p2p.system.disk_reports import REPEAT_S, DiskReports
from atoll.protocols.errors import DiskFault
from atoll.protocols.ids import PeerId


class Told:
    """The guard of a node's disk, and what its journal says."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "events.jsonl"
        self.now = 0.0
        self.log = RoundLog(folder, PeerId("me"), lambda: self.now)
        self.guard = FaultGuard(None, self.log, lambda: self.now)

    def kinds(self) -> Counter[str]:
        return Counter(json.loads(line)["event"] for line in self.journal.read_text().splitlines())


@pytest.fixture
def told(tmp_path: Path):
    found = Told(tmp_path)
    yield found
    found.log.close()


def full(path: str) -> DiskFault:
    return disk_fault(OSError(errno.ENOSPC, "full"), Path(path))


def failing(path: str) -> DiskFault:
    return disk_fault(OSError(errno.EIO, "failing"), Path(path))


def test_an_hour_of_two_that_are_refused_in_turn(told):
    """The mark of a chain, and the save of a round, each some times a second."""
    for turn in range(8 * 3600):
        told.now = turn / 8
        told.guard.on_disk_fault(full("leaving-chain") if turn % 2 else failing("spool/1.payload"))
    assert told.guard.trouble.startswith("leaving-chain: No space left on device"), "status says the newest"
    assert told.kinds() == {"trouble": 2 * 60}


def test_what_works_in_between_does_not_begin_it_anew(told):
    """Appends find room in a block where a new file finds none."""
    for second in range(600):
        told.now = float(second)
        told.guard.on_disk_fault(full("leaving-chain"))
        assert told.guard.trouble
        told.guard.on_disk_success()
        assert not told.guard.trouble
    assert told.kinds() == {"trouble": 10, "trouble_over": 10}


def test_one_kind_is_one_line_whatever_the_paths(told):
    for number in range(100):
        told.guard.on_disk_fault(full(f"blobs/{number}"))
    assert told.guard.trouble.startswith("blobs/99: ")
    assert told.kinds() == {"trouble": 1}


def test_each_report_has_one_end():
    reports = DiskReports()
    assert not reports.is_open
    assert reports.is_due("home: full", 0.0)
    assert reports.is_due("home: failing", 1.0), "another kind"
    assert not reports.is_due("else: full", REPEAT_S - 1)
    assert reports.is_open
    reports.is_open = False
    assert reports.is_due("else: full", REPEAT_S)
    assert reports.is_open
