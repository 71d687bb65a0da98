"""What `start` shows where nobody reads it."""

import threading

from atoll.cli import live_panel
from atoll.node.config.home import Home


def test_a_pipe_that_nobody_reads_ends_the_lines_and_nothing_else(tmp_path, monkeypatch):
    """As with `atoll start | head`: the node works on, and no traceback is printed."""
    failed, written = [], threading.Event()

    def write(*_):
        written.set()
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(live_panel, "_plain_lines", write)
    with live_panel.shown(Home(tmp_path), as_json=False, plain=True):
        assert written.wait(60)
    assert failed == []
