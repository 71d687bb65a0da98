"""Limits of control groups of both versions, on the group itself and above it, as the kernel's files say them."""

import os
from pathlib import Path

import pytest

from atoll.p2p.system.control_group import OWN, ROOT, group_kills, memory_left, memory_limit, usable_cpus

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


class Tree:
    """Files of control groups below a folder."""

    def __init__(self, folder: Path, own: str) -> None:
        self.root, self.own = folder / "cgroup", folder / "own"
        self.root.mkdir()
        self.own.write_text(own)

    def write(self, group: str, **files: str) -> None:
        """`memory_limit_in_bytes="1"` is the file memory.limit_in_bytes."""
        folder = self.root / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{text}\n")

    def __call__(self, ask):
        return ask(self.root, self.own)


@pytest.fixture
def version_2(tmp_path) -> Tree:
    tree = Tree(tmp_path, "0::/user.slice/atoll.service\n")
    tree.write("user.slice/atoll.service", memory_max="max", memory_current="700", memory_stat="anon 500")
    tree.write("user.slice", memory_max="max", memory_current="900", memory_stat="anon 1\ninactive_file 150")
    return tree


@pytest.fixture
def version_1(tmp_path) -> Tree:
    tree = Tree(tmp_path, "4:memory:/docker/ab\n3:cpu,cpuacct:/docker/ab\n0::/\n")
    far = str((1 << 63) - 4096)
    tree.write("memory/docker/ab", memory_limit_in_bytes=far, memory_usage_in_bytes="700")
    tree.write("memory/docker", memory_limit_in_bytes=far, memory_usage_in_bytes="900")
    tree.write("memory", memory_limit_in_bytes=far, memory_usage_in_bytes="1000")
    return tree


def test_no_limit_is_none(version_2):
    assert version_2(memory_limit) is None
    assert version_2(memory_left) is None
    assert version_2(usable_cpus) == CPUS
    assert version_2(group_kills) is None


def test_no_limit_of_version_1_is_none(version_1):
    assert version_1(memory_limit) is None
    assert version_1(memory_left) is None


@pytest.mark.parametrize(("own", "above", "limit", "left"), [
    ("1000", "max", 1000, 300), ("max", "1000", 1000, 250), ("5000", "1000", 1000, 250),
    ("1000", "5000", 1000, 300), ("600", "max", 600, 0),
])  # fmt: skip
def test_the_tightest_limit_counts_wherever_it_is_set(version_2, own, above, limit, left):
    version_2.write("user.slice/atoll.service", memory_max=own)
    version_2.write("user.slice", memory_max=above)
    assert version_2(memory_limit) == limit
    assert version_2(memory_left) == left


def test_limits_of_version_1(version_1):
    version_1.write(
        "memory/docker", memory_limit_in_bytes="1000", memory_stat="inactive_file 5\ntotal_inactive_file 50"
    )
    assert version_1(memory_limit) == 1000
    assert version_1(memory_left) == 150


def test_a_container_that_shows_its_own_part_only(tmp_path):
    """The path in /proc is that of the host; the root of what is mounted is the group."""
    tree = Tree(tmp_path, "0::/kubepods/pod7/abc\n")
    tree.write(".", memory_max="1000", memory_current="400", memory_stat="", cpu_max="150000 100000")
    assert tree(memory_limit) == 1000
    assert tree(memory_left) == 600
    assert tree(usable_cpus) == min(2, CPUS)


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000", CPUS), ("50000 100000", 1), ("100000 100000", 1), ("9900000 100000", CPUS)]
)
def test_the_quota_of_cpus(version_2, quota, cpus):
    version_2.write("user.slice", cpu_max=quota)
    assert version_2(usable_cpus) == cpus


def test_the_quota_of_cpus_of_version_1(version_1):
    for quota_us, cpus in (("-1", CPUS), ("50000", 1)):
        version_1.write("cpu/docker/ab", cpu_cfs_quota_us=quota_us, cpu_cfs_period_us="100000")
        assert version_1(usable_cpus) == cpus


def test_kills_are_those_of_the_own_group(version_2, tmp_path):
    version_2.write("user.slice", memory_events="oom_kill 9")
    version_2.write("user.slice/atoll.service", memory_events="low 0\noom 1\noom_kill 2")
    assert version_2(group_kills) == 2


def test_kills_of_version_1(version_1):
    version_1.write("memory/docker/ab", memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3")
    assert version_1(group_kills) == 3


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/../../etc\n", "1:name=systemd:/\n"])
def test_what_cannot_be_read_is_no_limit(tmp_path, own):
    tree = Tree(tmp_path, own)
    for ask in (memory_limit, memory_left, group_kills):
        assert tree(ask) is None
        assert ask(tmp_path / "none", tmp_path / "none") is None
    assert tree(usable_cpus) == CPUS


def test_this_machine_is_read():
    if not ROOT.is_dir() or not OWN.exists():
        pytest.skip("CONTROL GROUPS ARE NOT TESTED HERE: the kernel shows none")
    limit, left = memory_limit(), memory_left()
    assert (limit is None) == (left is None)
    assert limit is None or 0 <= left <= limit
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)
