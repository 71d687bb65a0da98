"""`atoll top`, driven by textual's Pilot over a real control socket."""

import asyncio
import builtins
import os
import pty
import subprocess
import sys

import msgspec
import pytest
from textual.widgets import DataTable, Log, Sparkline, Static, TabbedContent

from atoll.cli.top.reading import loss_chart, read_node, speed_chart
from atoll.cli.top.screen import NodeScreen
from atoll.protocols.errors import NotRunning
from tests.cli.conftest import ROUND_ROW, STATUS
from tests.waiting import HANGS_S, eventually


def text_of(screen, name):
    return str(screen.query_one(name, Static).content)


def screen_of(daemon, **options):
    return NodeScreen(daemon.home, read_node(daemon.home), every_s=0.05, **options)


async def test_it_shows_what_the_node_says_and_follows(daemon):
    screen = screen_of(daemon)
    async with screen.run_test(size=(120, 50)) as pilot:
        await pilot.pause()
        assert text_of(screen, "#head") == "atoll …sCdFk6TW otter · tiny · round 7 of 54 · collecting"
        assert "final round 5, digest cdcdcdcdcdcdcdcd by 1" in text_of(screen, "#facts")
        assert text_of(screen, "#loss-label") == "loss 2.500 nats per token, 2.500 … 2.500 in 2 rounds"
        assert text_of(screen, "#speed-label").startswith("speed 29257 tokens/s")
        assert list(screen.query_one("#loss", Sparkline).data) == [2.5, 2.5]
        assert screen.query_one("#peer-table", DataTable).row_count == 1
        assert screen.query_one("#round-table", DataTable).row_count == 2
        daemon.operator.state = msgspec.structs.replace(STATUS, round=8, trouble="the disk is full")
        await eventually(lambda: "round 8 of 54" in text_of(screen, "#head"))
        assert text_of(screen, "#alarm") == "the disk is full"


async def test_keys(daemon):
    screen = screen_of(daemon)
    async with screen.run_test(size=(120, 50)) as pilot:
        for page in ("peers", "rounds", "log", "now"):
            await pilot.press("tab")
            assert screen.query_one(TabbedContent).active == page
        await pilot.press("p")
        await eventually(lambda: daemon.operator.orders == ["pause by the operator"])
        await pilot.press("r")
        await eventually(lambda: daemon.operator.orders[1:] == ["resume"])
        await pilot.press("q")
    assert screen.return_code == 0
    assert daemon.operator.orders[2:] == [], "the node runs on"


async def test_a_node_that_ends_is_said_and_the_screen_stays(daemon):
    ended = NotRunning("the node ended before it answered", hint="start it with `atoll start`")

    def gone(home):
        raise ended

    screen = screen_of(daemon, read=gone)
    async with screen.run_test(size=(120, 50)):
        await eventually(lambda: text_of(screen, "#alarm") == ended.line())
        assert "round 7 of 54" in text_of(screen, "#head")


async def test_a_slow_node_is_not_asked_twice(daemon):
    asked, answer = [], read_node(daemon.home)
    loop, go = asyncio.get_running_loop(), asyncio.Event()

    def slow(home):
        asked.append(home)
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result(HANGS_S)
        return answer

    screen = screen_of(daemon, read=slow)
    async with screen.run_test(size=(120, 50)) as pilot:
        await eventually(lambda: asked)
        for _ in range(3):
            screen.refresh_node()
            await pilot.pause()
        assert len(asked) == 1
        go.set()
        await eventually(lambda: len(asked) > 1)


async def test_words_of_strangers_obey_nothing(daemon):
    """Neither markup of the library nor control characters of the terminal."""
    bad = "[red]x[/red] \x1b]0;title\x07"
    daemon.operator.state = msgspec.structs.replace(STATUS, name=bad, trouble=bad)
    daemon.operator.peer_row = msgspec.structs.replace(daemon.operator.peer_row, maddr=bad, name="[/red]")
    screen = screen_of(daemon)
    async with screen.run_test(size=(300, 50)) as pilot:
        await pilot.press("tab")
        shown = "\n".join(
            "".join(part.text for part in line) for line in screen.screen._compositor.render_strips()
        )
    assert "[red]x[/red] \ufffd]0;title\ufffd" in shown
    assert "sCdFk6TW  [/red]" in shown
    assert "\x1b" not in shown


async def test_the_log(daemon):
    daemon.home.log.write_text(
        '{"time":"2026-11-25T08:00:00.000Z","level":"INFO","logger":"atoll.node","message":"node starts"}\n'
    )
    screen = screen_of(daemon)
    async with screen.run_test(size=(120, 50)):
        assert screen.query_one("#log-lines", Log).lines[0] == "08:00:00 INFO    node starts"


def test_charts_of_no_round_and_of_rounds_without_work():
    assert loss_chart(()).label == "loss: no round yet"
    idle = msgspec.structs.replace(ROUND_ROW, train_loss=None, tokens=0, train_s=0.0)
    assert loss_chart((idle,)) == ([], "loss: no round yet")
    assert speed_chart((idle, ROUND_ROW)).values == [8192 / 0.28]


def test_one_reading_as_json_needs_no_screen(atoll, daemon):
    ran = atoll("top", "--json")
    assert ran.code == 0
    answer = msgspec.json.decode(ran.out)
    assert answer.keys() == {"type", "status", "peers", "rounds", "log"}
    assert answer["status"]["round"] == 7


def test_no_terminal_no_node_no_package(atoll, daemon, idle_daemon, monkeypatch):
    ran = atoll("top")
    assert (ran.code, ran.out) == (78, "")
    assert ran.err == ("error: `atoll top` needs a terminal; use `atoll status --watch`, or `atoll top --json`\n")
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("atoll.cli.top.screen"):
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.setattr("atoll.cli.top.command._is_terminal", lambda: True)
    assert atoll("top").err == "error: `atoll top` needs the package textual; pip install 'atoll[top]'\n"


def test_on_a_real_terminal_it_draws_and_ends_with_q(daemon):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "atoll.cli.main", "top", "--home", str(daemon.home.root)]
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    with os.fdopen(ours, "r+b", buffering=0) as terminal:
        seen = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        shown = b""
        while b"collecting" not in shown:
            shown += terminal.read(4096)
        terminal.write(b"q")
        while seen.poll() is None:
            try:
                shown += terminal.read(4096)
            except OSError:  # nobody has the other end open any more
                break
        assert seen.wait(HANGS_S) == 0
    assert b"Traceback" not in shown
    assert b"\x1b[?1049l" in shown, "the terminal's own screen is back"


def test_a_stopped_node(atoll, tmp_path):
    ran = atoll("top", "--home", str(tmp_path / "other"))
    assert ran.code == 3
    assert "no node runs" in ran.err


@pytest.mark.parametrize("every", ["0", "1e9"])
def test_the_interval_has_a_range(atoll, every):
    assert atoll("top", "--every", every).code == 2
