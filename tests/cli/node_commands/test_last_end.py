"""What `status` says of a node that does not run."""

import os
from pathlib import Path

import pytest

from atoll.cli.node_commands.last_end import last_end
from atoll.node.config.home import Home, hold_lock

DONE = '{"time": 2.0, "event": "closed", "round": 7}'
STOPPED = '{"time": 3.0, "event": "stopping"}'
FAILED = '{"time": 3.0, "event": "failed", "error": "train.txt is not the text of this run"}'
CRASHED = '{"time": 3.0, "event": "crashed", "error": "TypeError()"}'


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


def wrote(home: Home, *lines: str, run: str = "ab", unix_s: float = 1e9) -> None:
    """A run's journal, changed last at `unix_s`."""
    path = home.runs / run / "events.jsonl"
    path.parent.mkdir()
    path.write_text("".join(f"{line}\n" for line in lines))
    os.utime(path, (unix_s, unix_s))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ((DONE, STOPPED), "the last one that came up was stopped"),
        (
            (DONE, STOPPED, '{"time": 4.0, "event": "handed_over"}', '{"torn'),
            "the last one that came up was stopped",
        ),
        ((STOPPED, DONE, FAILED), "the last one ended: train.txt is not the text of this run"),
        ((STOPPED, FAILED), "the last one ended: train.txt is not the text of this run"),
        (
            (STOPPED, '{"time": 4.0, "event": "not_saved", "error": "the worker died"}'),
            "the last one that came up was stopped, and lost what was not saved yet: the worker died",
        ),
        ((STOPPED, CRASHED), "a bug ended the last one, see `atoll logs`: TypeError()"),
        ((DONE,), ""),
        ((), ""),
    ],
)
def test_the_newest_end_of_the_newest_run_counts(home: Home, lines: tuple[str, ...], said: str) -> None:
    wrote(home, STOPPED, run="older", unix_s=9e8)
    wrote(home, *lines)
    assert last_end(home) == said


def test_a_kill_leaves_the_control_socket_whatever_the_journal_says(home: Home) -> None:
    wrote(home, STOPPED, DONE)
    home.control_socket.touch()
    assert last_end(home) == "the last one was killed, told to stop twice, or lost its power or its disk"


def test_a_node_that_starts_has_not_ended(home: Home) -> None:
    with hold_lock(home):
        assert last_end(home) == ""


def test_who_asks_in_the_second_of_a_start_is_not_told_to_start(atoll, home: Home) -> None:
    for command in ("status", "peers", "pause"):
        with hold_lock(home):
            ran = atoll(command, "--home", str(home.root))
        assert (ran.code, ran.out) == (3, "")
        assert (
            ran.err
            == f"error: the node in {home.root} starts or ends, and does not answer; ask again in a moment\n"
        )


def test_who_asks_in_a_home_without_a_run_is_told_how_to_get_one(atoll, home: Home) -> None:
    for command in ("status", "peers", "status --last"):
        ran = atoll(*command.split(), "--home", str(home.root))
        assert (ran.code, ran.out) == (3, "")
        assert ran.err.endswith("join one with `atoll start INVITE`, or make one with `atoll run new NAME`\n")
    (home.runs / "tiny.run").touch()
    assert atoll("peers", "--home", str(home.root)).err.endswith("; start it with `atoll start`\n")


def test_a_home_that_is_none(tmp_path: Path) -> None:
    assert last_end(Home(tmp_path / "none")) == ""


def test_status_says_it_in_its_one_line(atoll, tmp_path: Path) -> None:
    home = Home(tmp_path / "stopped")
    home.make()
    wrote(home, FAILED)
    for watch in ((), ("--watch",)):
        ran = atoll("status", "--home", str(home.root), *watch)
        assert (ran.code, ran.out) == (3, "")
        assert ran.err == (
            f"error: no node runs in {home.root}; the last one ended: train.txt is not the text of this run; "
            "it has no run: join one with `atoll start INVITE`, or make one with `atoll run new NAME`\n"
        )
