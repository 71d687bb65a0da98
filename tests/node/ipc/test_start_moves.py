"""Whether a worker's start gets on."""

import os
import subprocess
import sys

from atoll.node.ipc.start_moves import CPU_S, StartMoves, cpu_seconds
from tests.waiting import poll


def looked(moves: StartMoves, *cpu_s: float, passed_s: float = 5.0) -> list[float]:
    """Seconds without progress after each look."""
    found = []
    for each in cpu_s:
        moves.look(passed_s, each)
        found.append(moves.still_s)
    return found


def test_nothing_was_asked_to_start():
    assert StartMoves().count == 0


def test_phases_and_cpu_time_are_progress_and_nothing_else_is():
    moves = StartMoves()
    moves.begin()
    assert moves.count == 1
    assert looked(moves, 1.0, 1.0, 1.0) == [0.0, 5.0, 10.0]
    moves.move()
    assert (moves.count, moves.still_s) == (3, 0.0)
    assert looked(moves, 1.0, 1.0 + CPU_S / 2, 1.0 + CPU_S, 1.0 + 3 * CPU_S / 2) == [5.0, 10.0, 0.0, 5.0]
    assert moves.count == 4
    assert moves.took_s == 35.0


def test_cpu_time_after_one_of_its_processes_ended_is_progress():
    moves = StartMoves()
    moves.begin()
    assert looked(moves, 300.0, 20.0, 20.0 + CPU_S, 20.0 + CPU_S) == [0.0, 5.0, 0.0, 5.0]


def test_a_start_counts_its_time_and_its_processes_alone():
    moves = StartMoves()
    moves.begin()
    looked(moves, 90.0, 90.0)
    moves.begin()
    assert (moves.took_s, moves.still_s) == (0.0, 0.0)
    assert looked(moves, 0.0, CPU_S) == [5.0, 0.0], "a fresh process has used less than the one before"
    assert moves.count == 4, "signs are counted over all starts"


def test_cpu_time_is_that_of_a_process_and_of_those_that_it_started():
    loop = "while True: pass"
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {loop!r}])"
    parent = subprocess.Popen([sys.executable, "-c", started], start_new_session=True)
    try:
        poll("its child computes", lambda: cpu_seconds(parent.pid) > 0.5)
    finally:
        os.killpg(parent.pid, 9)
        parent.wait()
    assert cpu_seconds(parent.pid) == 0.0, "it is gone"
