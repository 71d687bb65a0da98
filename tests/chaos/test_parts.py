"""Parts of the cases: processes that are stopped, copies of a disk, and when nodes are in one chain."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from tests.chaos.loop_image import in_copy, mounted
from tests.chaos.net_cases import Net
from tests.chaos.power_cases import copy_of
from tests.chaos.stopped import stopped
from tests.waiting import HANGS_S, poll

COUNTS = """
import sys, time
while True:
    print("x", flush=True)
    time.sleep(0.001)
"""


def test_nothing_happens_while_nodes_are_stopped_and_they_go_on(tmp_path):
    path = tmp_path / "out"
    with path.open("wb") as out, subprocess.Popen([sys.executable, "-c", COUNTS], stdout=out) as process:
        try:
            node = SimpleNamespace(processes=lambda: [psutil.Process(process.pid)])
            poll("it counts", lambda: path.stat().st_size > 100)
            with stopped([node]):
                before = path.stat().st_size
                assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
                assert path.stat().st_size == before
            poll("it counts on", lambda: path.stat().st_size > before)
        finally:
            process.kill()


def test_a_copy_holds_what_was_synced_and_not_what_was_not(tmp_path):
    """Fails, and never skips, where loop mounts cannot be had."""
    image, disk = tmp_path / "disk.img", tmp_path / "disk"
    writes = (
        "import os,sys\n"
        "for name, is_synced in (('synced', True), ('lost', False)):\n"
        "    with open(os.path.join(sys.argv[1], name), 'w') as file:\n"
        "        file.write(name); file.flush()\n"
        "        if is_synced:\n"
        "            os.fsync(file.fileno())\n"
    )
    with mounted(image, disk):
        subprocess.run([sys.executable, "-c", writes, str(disk)], check=True, timeout=HANGS_S)
        copy_of(image, tmp_path / "copy.img")
        (disk / "later").write_text("later")
        found = in_copy(tmp_path / "copy.img", disk, lambda: sorted(path.name for path in disk.glob("*")))
        assert "synced" in found
        assert "later" not in found
        assert "lost" not in found
        assert sorted(path.name for path in disk.glob("l*")) == ["later", "lost", "lost+found"]
        broken = in_copy(tmp_path / "no.img", disk, list)
        assert "Traceback" in broken[0], "a copy that cannot be opened is no copy in which nothing is wrong"


@pytest.mark.parametrize(
    ("finals", "expected"),
    [
        ([["a", "b", "c"], ["a", "b", "c"]], True),
        ([["a", "b", "c", "d", "e", "f"], ["a", "b", "c"]], True),
        ([["a", "b", "c", "d", "e", "f", "g"], ["a", "b", "c"]], False),
        ([["a", "b", "x"], ["a", "b", "c"]], False),
        ([["a", "b", "c"], []], False),
    ],
)
def test_nodes_are_in_one_chain_if_the_newest_common_round_has_one_digest(finals, expected):
    rows = [[{"round": n, "digest": one, "final": True} for n, one in enumerate(each)] for each in finals]
    net = Net.__new__(Net)
    net.nodes = [SimpleNamespace(rounds=lambda each=each: each) for each in rows]
    assert net.one_chain() is expected
