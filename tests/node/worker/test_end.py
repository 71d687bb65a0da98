"""A worker process ends at once: what is registered for the end is run, and no module is taken apart."""

import subprocess
import sys

PROBE = """
import atexit, os, sys, threading, time

def say(what):
    os.write(2, f"{what}\\n".encode())

class Kept:
    def __del__(self, write=os.write):
        write(2, b"taken apart\\n")

def work():
    while "atoll.node.worker.main" not in sys.orig_argv or threading.main_thread().is_alive():
        time.sleep(0.01)
    say("thread has ended")

atexit.register(say, "registered")
kept = Kept()
threading.Thread(target=work).start()
"""
"""`is_alive` of the main thread turns false when the interpreter begins to wait for the other threads."""


def test_the_end_waits_for_threads_and_takes_nothing_apart(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(PROBE)
    done = subprocess.run(
        [sys.executable, "-m", "atoll.node.worker.main"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=300,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.splitlines() == ["thread has ended", "registered"]
