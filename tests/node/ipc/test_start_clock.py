"""How far a worker's start is, and its estimate from the newest start that was whole."""

from atoll.node.ipc.start_clock import LOADING, StartClock
from atoll.protocols.local.progress import StartProgress

PHASES = (("compiling", 20.0), ("text", 3.0), ("model", 2.0))


class Time:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def start(clock, time, phases=PHASES, loads_s=5.0, whole=True):
    """One start; what each phase showed when it began, and the rest of the start then."""
    clock.begin()
    shown = [clock.progress()]
    time.now_s += loads_s
    for phase, took_s in phases:
        clock.advance(StartProgress(phase))
        shown.append(clock.progress())
        time.now_s += took_s
    clock.end(is_whole=whole)
    return shown


def test_the_first_start_says_its_phase_and_no_estimate(tmp_path):
    time = Time()
    shown = start(StartClock(tmp_path / "times", time), time)
    assert [one.work for one in shown] == [LOADING, "compiling", "text", "model"]
    assert [one.took_s for one in shown] == [0, 5, 25, 28]
    assert [one.left_s for one in shown] == [None] * 4


def test_the_next_start_has_the_seconds_of_the_one_before(tmp_path):
    time = Time()
    start(StartClock(tmp_path / "times", time), time)
    again = StartClock(tmp_path / "times", time)  # another daemon
    assert [one.left_s for one in start(again, time)] == [30, 25, 5, 2]
    assert again.progress() is None, "no start is under way"


def test_a_phase_that_takes_longer_than_last_time_has_no_estimate(tmp_path):
    time, path = Time(), tmp_path / "times"
    start(StartClock(path, time), time)
    clock = StartClock(path, time)
    clock.begin()
    time.now_s += 4
    assert clock.progress().left_s == 26
    time.now_s += 2
    assert clock.progress().left_s is None
    clock.advance(StartProgress("compiling"))
    assert clock.progress().left_s == 25, "the phases after it have"


def test_a_start_that_failed_is_no_measure(tmp_path):
    time = Time()
    clock = StartClock(tmp_path / "times", time)
    start(clock, time, whole=False)
    assert [one.left_s for one in start(clock, time)] == [None] * 4


def test_a_worker_that_is_loaded_already_keeps_how_long_loading_took(tmp_path):
    time = Time()
    clock = StartClock(tmp_path / "times", time)
    start(clock, time)
    clock.begin(is_loaded=True)
    assert clock.progress() is None
    for phase, took_s in PHASES:
        clock.advance(StartProgress(phase))
        time.now_s += took_s
    clock.end(is_whole=True)
    assert start(clock, time)[0].left_s == 30


def test_a_damaged_file_or_a_full_disk_costs_only_the_estimate(tmp_path):
    time, path = Time(), tmp_path / "times"
    for spoiled in (b"", b"x" * 5000, b"\xff" * 20):
        path.write_bytes(spoiled)
        assert start(StartClock(path, time), time)[0].left_s is None
    nowhere = StartClock(tmp_path / "gone" / "times", time)
    start(nowhere, time)
    assert start(nowhere, time)[0].left_s == 30, "this daemon still knows"
