"""What `start` shows where nobody reads it, and what the panel shows of strangers' names."""

import errno
import io
import os
import threading

import pytest
from msgspec.structs import replace
from rich.console import Console

from atoll.cli import live_panel
from atoll.cli.formatting import columns_of, print_table
from atoll.cli.node_commands import panel_screen
from atoll.node.config.home import Home
from tests.cli.conftest import STATUS


@pytest.mark.parametrize("fault", [errno.EPIPE, errno.ENOSPC])
def test_an_output_that_takes_no_more_ends_the_lines_and_nothing_else(tmp_path, monkeypatch, fault):
    """As with `atoll start | head`, or a file on a full disk: the node works on, and no traceback is printed."""
    failed, written = [], threading.Event()

    def write(*_):
        written.set()
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(live_panel, "drop_output", lambda: None)  # this output is the test's own
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(live_panel, "_plain_lines", write)
    with live_panel.shown(Home(tmp_path), as_json=False, plain=True):
        assert written.wait(60)
    assert failed == []


def test_a_name_in_the_panel_is_no_markup():
    """A member calls itself `[/red]`: the panel's library would raise for that, or obey `[red]`."""
    now = replace(STATUS, name="[red]x", val_by=STATUS.peer, val_round=4, names={STATUS.peer: "[/red]"})
    console = Console(width=120, file=io.StringIO())
    console.print(panel_screen.render(now))
    shown = console.file.getvalue()
    assert "…sCdFk6TW [red]x · tiny" in shown
    assert "of round 4, by …sCdFk6TW [/red]" in shown


@pytest.mark.parametrize(("text", "columns"), [("otter", 5), ("北京", 4), ("한", 2), ("ก็", 1), ("Zoë", 3)])
def test_columns_of_a_terminal(text, columns):
    assert columns_of(text) == columns


def test_a_table_is_straight_whatever_its_names(capsys):
    print_table(("name", "path"), [("北京", "direct"), ("ก็", "relayed")])
    assert capsys.readouterr().out == "name  path\n北京  direct\nก็     relayed\n"
