"""The probe strikes where it is told, and nowhere else."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.disk_cases import environment

WRITES = """
from pathlib import Path
import sys, time
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.errors import DiskFault
try:
    write_whole(Path(sys.argv[1]), b"new")
    print("written", round(time.time()))
except DiskFault as fault:
    print(fault)
"""
STEP = "{} p2p/system/atomic_files.py:write_whole"
"""What nobody but plumbing asks for has the plumbing's name."""


def written(folder: Path, **variables: str) -> tuple[int, str, str]:
    """The exit code of a process that replaces a file, what it printed, and what is in the file then."""
    script, target = folder / "atoll_writes.py", folder / "file"
    script.write_text(WRITES)
    target.write_text("old")
    with environment(variables):
        done = subprocess.run(
            [sys.executable, str(script), str(target)], capture_output=True, text=True, timeout=120, check=False
        )
    return done.returncode, done.stdout + done.stderr, target.read_text()


def strike(folder: Path, kind: str, when: str, nth: int, how: str) -> dict[str, str]:
    words = {"role": "daemon", "step": STEP.format(kind), "when": when, "nth": nth, "how": how}
    return {"CHAOS_FOLDER": str(folder), "CHAOS_STRIKE": json.dumps(words)}


def test_steps_are_found_by_following(tmp_path):
    code, said, text = written(tmp_path, CHAOS_FOLDER=str(tmp_path))
    assert (code, text) == (0, "new"), said
    assert (tmp_path / "steps-daemon").read_text().splitlines() == [STEP.format(k) for k in ("fsync", "replace")]


@pytest.mark.parametrize(
    ("kind", "when", "nth", "left"),
    [
        ("fsync", "before", 1, "old"),
        ("fsync", "after", 1, "old"),
        ("replace", "before", 1, "old"),
        ("replace", "after", 1, "new"),
        ("fsync", "before", 2, "new"),
    ],
)
def test_a_strike_kills_before_or_after_the_nth_step(tmp_path, kind, when, nth, left):
    code, said, text = written(tmp_path, **strike(tmp_path, kind, when, nth, "kill"))
    assert (code, text) == (-9, left), said
    assert (tmp_path / "struck").exists()


def test_a_strike_can_be_an_error_of_the_disk(tmp_path):
    code, said, text = written(tmp_path, **strike(tmp_path, "fsync", "before", 1, "eio"))
    assert (code, text) == (0, "old")
    assert "Input/output error" in said


READS = """
import os, sys
from pathlib import Path
from atoll.p2p.ledger.database import Database
from atoll.p2p.system.atomic_files import read_whole
from atoll.protocols.errors import AtollError
folder = Path(sys.argv[1])
for act in (
    lambda: read_whole(folder / "file", max_bytes=9),
    lambda: read_whole(Path(sys.argv[0]), max_bytes=9999)[1:7],
    lambda: Database(folder / "ledger", bytes(32), 1 << 20).rows("SELECT 7"),
):
    try:
        print(act())
    except AtollError as fault:
        print(fault)
"""
FILE_READ = "open p2p/system/atomic_files.py:read_whole"
QUESTION = "select p2p/ledger/database.py:Database.rows"


def read(folder: Path, **variables: str) -> list[str]:
    """What a process printed that reads a file below a folder, one elsewhere, and a database."""
    script, home = folder / "atoll_reads.py", folder / "home"
    home.mkdir(exist_ok=True)
    (home / "file").write_text("old")
    script.write_text(READS)
    with environment({"CHAOS_FOLDER": str(folder), "CHAOS_READS": str(home), **variables}):
        done = subprocess.run(
            [sys.executable, str(script), str(home)], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_reads_of_a_folder_are_followed_and_can_fail(tmp_path):
    sound = ["b'old'", "b'import'", "[(7,)]"]
    assert read(tmp_path) == sound
    found = (tmp_path / "reads-daemon").read_text().splitlines()
    assert {FILE_READ, QUESTION} <= {*found}
    for step, at in ((FILE_READ, 0), (QUESTION, 2)):
        words = {"role": "daemon", "step": step, "when": "before", "nth": 1, "how": "eio"}
        said = read(tmp_path, CHAOS_STRIKE=json.dumps(words))
        assert [line for line in said if line not in sound] == [said[at]]
        assert "rror" in said[at], said


def test_a_process_can_be_of_another_version(tmp_path):
    script = tmp_path / "atoll_wires.py"
    script.write_text("from atoll.p2p.rpc.frames import CALLS\nprint(CALLS.newest, CALLS.oldest, CALLS.name)")
    with environment({"CHAOS_WIRES": json.dumps({"CALLS": 9})}):
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
        )
    assert done.stdout.split() == ["9", "9", "calls"], done.stderr


def test_the_wall_clock_can_be_wrong(tmp_path):
    words = [written(tmp_path, CHAOS_CLOCK_S=str(ahead_s))[1].split() for ahead_s in (0, 21_600)]
    assert int(words[1][1]) - int(words[0][1]) >= 21_600


JUMPS = """
import os, sys, time
told = []
for words in ("21600", "-21600", "0"):
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(words)
    os.replace(sys.argv[1] + ".new", sys.argv[1])
    told.append(round((time.time() - float(sys.argv[2])) / 3600))
print(*told, round((time.time_ns() / 1e9 - float(sys.argv[2])) / 3600))
"""


def test_the_wall_clock_can_jump_while_a_process_runs(tmp_path):
    script, clock = tmp_path / "atoll_jumps.py", tmp_path / "clock"
    script.write_text(JUMPS)
    with environment({"CHAOS_CLOCK": str(clock)}):
        done = subprocess.run(
            [sys.executable, str(script), str(clock), str(time.time())],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.stdout.split() == ["6", "-6", "0", "0"], done.stderr
