"""Progress of long work: a bar on a terminal, a line in ten seconds elsewhere, silence for short work and JSON."""

import pytest

from atoll.cli.progress_line import ProgressLine


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def shown(capsys, *, is_terminal, seconds, monkeypatch, quiet=False, of=10, is_bytes=False):
    """What is drawn of ten steps that take so long each."""
    clock = Clock()
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with ProgressLine("writing", quiet=quiet, clock=clock) as line:
        clock.now_s += 60  # the modules load
        for done in range(11):
            line.show(done, of, is_bytes=is_bytes)
            clock.now_s += seconds
    return capsys.readouterr().err


def test_elsewhere_a_line_every_ten_seconds(capsys, monkeypatch):
    text = shown(capsys, is_terminal=False, seconds=6.0, monkeypatch=monkeypatch)
    assert text.splitlines() == [
        "writing  20% (2 of 10), about 48.0 s left",
        "writing  40% (4 of 10), about 36.0 s left",
        "writing  60% (6 of 10), about 24.0 s left",
        "writing  80% (8 of 10), about 12.0 s left",
        "writing 100% (10 of 10)",
    ]
    assert all(line.isprintable() for line in text.splitlines()), "no control characters"


def test_on_a_terminal_a_bar_that_goes(capsys, monkeypatch):
    text = shown(capsys, is_terminal=True, seconds=2.0, monkeypatch=monkeypatch)
    assert text.count("\r\x1b[K") == 11, "ten times drawn, once erased"
    assert "███" in text
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


def test_where_nobody_knows_the_whole_there_is_no_bar_and_no_estimate(capsys, monkeypatch):
    text = shown(capsys, is_terminal=False, seconds=12.0, monkeypatch=monkeypatch, of=0, is_bytes=True)
    assert text.splitlines()[0] == "writing 1 B, 12.0 s so far"
    drawn = shown(capsys, is_terminal=True, seconds=12.0, monkeypatch=monkeypatch, of=0)
    assert "writing 10, 2 m 00 s so far" in drawn
    assert "left" not in text + drawn
    assert "█" not in drawn


def test_each_part_of_the_work_has_its_own_pace(capsys, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    with ProgressLine("packing", clock=clock) as line:
        for name, seconds in (("reading", 100.0), ("writing", 1.0)):
            for done in range(13):
                line.begin(name)
                line.show(done, 20)
                clock.now_s += seconds
    assert capsys.readouterr().err.splitlines()[-1] == "writing  50% (10 of 20), about 10.0 s left"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_short_work_and_json_show_nothing(capsys, monkeypatch, is_terminal):
    assert shown(capsys, is_terminal=is_terminal, seconds=0.05, monkeypatch=monkeypatch) == ""
    assert shown(capsys, is_terminal=is_terminal, seconds=9.0, monkeypatch=monkeypatch, quiet=True) == ""
