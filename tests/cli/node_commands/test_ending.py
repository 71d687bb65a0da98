"""`stop --wait` returns when the node's lock is free, not before, and reaches a node that was starting."""

import errno
import os
import threading
import time

import pytest

from atoll.cli.client import NoAnswer
from atoll.cli.node_commands import ending
from atoll.cli.node_commands.ending import wait_for_end
from atoll.node.config.home import Home, hold_lock, is_locked
from atoll.protocols.errors import NotRunning
from atoll.protocols.local.control_messages import CommandDone
from tests.waiting import HANGS_S, poll


class Held:
    """A lock as a node has it, on a thread of its own."""

    def __init__(self, home: Home) -> None:
        self._end, self._is_held = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._hold, args=(home,))
        self._thread.start()
        assert self._is_held.wait(HANGS_S)

    def _hold(self, home: Home) -> None:
        with hold_lock(home):
            self._is_held.set()
            self._end.wait(HANGS_S)

    def give_back(self) -> None:
        self._end.set()
        self._thread.join()


@pytest.fixture
def held(daemon):
    lock = Held(daemon.home)
    yield lock
    lock.give_back()


def test_the_lock_is_looked_at_and_not_taken(tmp_path):
    home = Home(tmp_path / "home")
    assert not is_locked(home)
    assert not home.root.exists()
    with hold_lock(home):
        assert is_locked(home)
        assert home.lock.read_text().strip().isdigit(), "its pid stays"
    assert not is_locked(home)


def test_the_lock_of_a_read_only_home_is_looked_at_too(tmp_path, monkeypatch):
    """Whatever access(2) says: ext4 that met an error (emergency_ro) still calls its files writable."""
    home, opens = Home(tmp_path / "home"), os.open

    def reads_only(path, flags, *mode, **place):
        if path == home.lock and flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return opens(path, flags, *mode, **place)

    with hold_lock(home):
        monkeypatch.setattr(os, "open", reads_only)
        assert is_locked(home)
    assert not is_locked(home)


def test_without_wait_a_node_that_was_starting_is_told_too(atoll, tmp_path, monkeypatch):
    home, asked = Home(tmp_path / "home"), []

    def answers_the_third_time(*request):
        asked.append(request)
        if len(asked) < 3:
            raise NotRunning("nobody listens yet")
        return CommandDone("it ends")

    monkeypatch.setattr(ending, "call", answers_the_third_time)
    with hold_lock(home):
        ran = atoll("--home", str(home.root), "stop")
    assert (ran.code, ran.out) == (0, "it ends\n")
    asked.clear()
    ran = atoll("--home", str(home.root), "stop")
    assert (ran.code, ran.out, len(asked)) == (0, "no node runs here\n", 1), "nobody starts"


def test_it_returns_after_the_end_and_not_before(atoll, daemon, held):
    ran = []
    waiting = threading.Thread(target=lambda: ran.append(atoll("stop", "--wait")))
    waiting.start()
    poll("the node was told", lambda: daemon.operator.orders)
    assert not ran
    daemon.home.control_socket.unlink()
    held.give_back()
    waiting.join()
    assert (ran[0].code, ran[0].out) == (0, "the node ended\n")
    assert set(daemon.operator.orders) == {"stop finish=False"}


def test_one_that_is_killed_while_it_stops_is_no_success(atoll, daemon, held):
    """A script that unmounts the disk, or copies the home, went on as if all had been saved."""
    ran = []
    waiting = threading.Thread(target=lambda: ran.append(atoll("stop", "--wait")))
    waiting.start()
    poll("the node was told", lambda: daemon.operator.orders)
    held.give_back()  # and its socket stays, as a kill leaves it
    waiting.join()
    assert (ran[0].code, ran[0].out) == (1, "")
    words = "error: the node was killed, or its disk refused, before it had stopped; `atoll start` goes on"
    assert ran[0].err.startswith(words)


def stopped(atoll, daemon, held, before: tuple[str, ...], then: tuple[str, ...]):
    """`stop --wait` of a node whose journal has some lines `before`, and `then` others."""
    ran, journal = [], daemon.home.runs / "ab" / "events.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_text("".join(before))
    waiting = threading.Thread(target=lambda: ran.append(atoll("stop", "--wait")))
    waiting.start()
    poll("the node was told", lambda: daemon.operator.orders)
    journal.write_text("".join((*before, *then)))
    daemon.home.control_socket.unlink()
    held.give_back()
    waiting.join()
    return ran[0]


def line(event: str, error: str = "", later_s: float = 0.0) -> str:
    return f'{{"time": {time.time() + later_s:.3f}, "event": "{event}", "error": "{error}"}}\n'


FAILED = "error: the node failed: the disk is full; `atoll start` goes on from what it saved\n"
UNSAVED = (
    "error: the node lost what was not saved yet: the disk is full; `atoll start` goes on from what it saved\n"
)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([("failed", "the disk is full")], FAILED),
        ([("stopping", ""), ("failed", "the disk is full")], FAILED),
        ([("stopping", ""), ("not_saved", "the worker died"), ("failed", "the disk is full")], FAILED),
        ([("stopping", ""), ("not_saved", "the disk is full"), ("handed_over", "")], UNSAVED),
        ([("failed", "the disk is full"), ("not_saved", "the worker died")], FAILED),
        ([("stopping", "")], ""),
    ],
)
def test_one_that_fails_while_it_stops_is_no_success(atoll, daemon, held, ends, said):
    ran = stopped(atoll, daemon, held, (), tuple(line(*end, later_s=60.0) for end in ends))
    assert (ran.code, ran.err) == (1 if said else 0, said)


def test_one_that_failed_just_before_it_was_told_is_no_success_either(atoll, daemon, held):
    """A script that sees `trouble`, and stops the node, meets it: its end takes up to 48 s."""
    ran = stopped(atoll, daemon, held, (line("failed", "the disk is full", later_s=0.1),), ())
    assert (ran.code, ran.err) == (1, FAILED)


def test_the_fault_of_a_node_before_this_one_does_not_count(atoll, daemon, held):
    """A node that is told before it came up writes no end."""
    before = line("failed", "the disk is full", -60.0), line("stopping", "", -60.0), line("not_saved", "x", -60.0)
    ran = stopped(atoll, daemon, held, before, ())
    assert (ran.code, ran.err) == (0, "")


def test_a_node_that_was_starting_is_told_as_soon_as_it_answers(atoll, idle_daemon):
    lock, ran = Held(idle_daemon.home), []
    waiting = threading.Thread(target=lambda: ran.append(atoll("stop", "--wait", "--finish")))
    waiting.start()
    with idle_daemon.running():
        poll("the node was told", lambda: idle_daemon.operator.orders)
    lock.give_back()
    waiting.join()
    # Twice where the node ends before the answer to the first is sent: telling it again does no harm.
    assert (ran[0].code, set(idle_daemon.operator.orders)) == (0, {"stop finish=True"})


def test_no_node_is_no_error(atoll):
    ran = atoll("stop", "--wait")
    assert (ran.code, ran.out) == (0, "no node runs here\n")


def test_one_that_does_not_end_is_exit_5(daemon, held):
    with pytest.raises(NoAnswer) as caught:
        wait_for_end(daemon.home, finish=False, within_s=0.2)
    assert caught.value.exit_code == 5
    assert "the node did not end within 0 s; look at `atoll logs`" in caught.value.line()
