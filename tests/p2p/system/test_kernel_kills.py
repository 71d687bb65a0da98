"""The kernel's own count of what it ended for lack of memory."""

from pathlib import Path

import pytest

from atoll.p2p.system.child_processes import kernel_kills


@pytest.mark.parametrize(
    ("text", "count"),
    [("pgfault 9\noom_kill 3\npgmajfault 1\n", 3), ("pgfault 9\n", 0), ("oom_kill many\n", 0), ("oom_kill\n", 0)],
)
def test_the_count_is_read_and_nothing_breaks_where_there_is_none(tmp_path, text, count):
    path = tmp_path / "vmstat"
    path.write_text(text)
    assert kernel_kills(path, lambda: None) == count
    assert kernel_kills(path, lambda: 2) == count + 2, "of the control group too"
    assert kernel_kills(tmp_path / "none", lambda: None) == 0


def test_this_kernel_says_it():
    assert "\noom_kill " in Path("/proc/vmstat").read_text()
