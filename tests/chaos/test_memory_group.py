"""The group that a lack of memory is played in; fails, and never skips, where no group can be had."""

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.p2p.system.child_processes import kernel_kills
from tests.chaos.memory_group import VERSION_1, VERSION_2, memory_group, place_of
from tests.waiting import poll

HOLDS = "held = bytearray(b'x' * (100 << 20)); print('held', flush=True); import time; time.sleep(600)"


def test_the_kernel_ends_who_holds_most():
    before = kernel_kills()
    with memory_group("test") as group:
        assert group.kills == 0
        waits = [sys.executable, "-c", f"input(); {HOLDS}"]
        with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                group.add(process.pid)
                process.stdin.write(b"\n")
                process.stdin.flush()
                assert process.stdout.readline() == b"held\n"
                assert group.used > 100 << 20
                group.set_limit(group.used + (16 << 20))
                assert process.poll() is None
                with group.eaten(48 << 20):
                    poll("it is ended", lambda: process.poll() is not None)
                assert process.returncode == -9
            finally:
                process.kill()
        assert group.kills == 1
        assert kernel_kills() > before
    assert not group.folder.exists()


@pytest.mark.parametrize(
    ("own", "place", "names"),
    [
        ("8:pids:/\n4:memory:/a/b\n0::/\n", "memory/a/b", VERSION_1),
        ("0::/user.slice/mine.scope\n", "user.slice", VERSION_2),
        ("0::/\n", ".", VERSION_2),
    ],
)
def test_a_group_is_made_where_processes_may_have_limits(own, place, names):
    assert place_of(own, Path("/r")) == (Path("/r") / place, names)
