"""Progress of long work: a bar on a terminal, quarters elsewhere, silence for short work and for JSON."""

import pytest

from atoll.cli.progress_line import ProgressLine


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def shown(capsys, *, is_terminal, seconds, monkeypatch, quiet=False):
    """What is drawn of ten steps that take so long each."""
    clock = Clock()
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    with ProgressLine("writing", quiet=quiet, clock=clock) as line:
        clock.now_s += 60  # the modules load
        for done in range(11):
            line.show(done, 10)
            clock.now_s += seconds
    return capsys.readouterr().err


def test_elsewhere_a_line_at_each_quarter(capsys, monkeypatch):
    assert shown(capsys, is_terminal=False, seconds=2.0, monkeypatch=monkeypatch).splitlines() == [
        "writing  30%, about 14.0 s left",
        "writing  50%, about 10.0 s left",
        "writing  80%, about 4.0 s left",
        "writing 100%",
    ]


def test_on_a_terminal_a_bar_that_goes(capsys, monkeypatch):
    text = shown(capsys, is_terminal=True, seconds=2.0, monkeypatch=monkeypatch)
    assert text.count("\r\x1b[K") == 11, "ten times drawn, once erased"
    assert "███" in text
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


@pytest.mark.parametrize("is_terminal", [False, True])
def test_short_work_and_json_show_nothing(capsys, monkeypatch, is_terminal):
    assert shown(capsys, is_terminal=is_terminal, seconds=0.05, monkeypatch=monkeypatch) == ""
    assert shown(capsys, is_terminal=is_terminal, seconds=9.0, monkeypatch=monkeypatch, quiet=True) == ""
