"""What a killed lab left is found by its process, without a lab: folders here, namespaces in test_lab.py."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from atoll_lab import sweep as sweeping
from atoll_lab.sweep import is_gone, scratch, sweep

OURS = "atollrigtest"
"""A prefix that labs of other tests, which run at the same time, do not sweep."""


def test_folders_of_a_killed_process_are_swept(monkeypatch):
    monkeypatch.setattr(sweeping, "PREFIX", OURS)
    program = (
        "import atoll_lab.sweep as s, os\n"
        f"s.PREFIX = {OURS!r}; f = s.scratch(); print(f.name, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    with scratch() as ours:
        assert str(left) in sweep()
        assert not left.exists()
        assert Path(ours).exists(), "of a process that lives"


def test_the_number_of_a_process_that_is_in_use_again_protects_nothing():
    assert not is_gone(os.getpid(), time.time())
    assert is_gone(os.getpid(), psutil.Process().create_time() - 60.0)
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert is_gone(process.pid, time.time())
