"""`atoll web`, the line of `start` about its page, and when a browser is opened."""

import json
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from atoll.cli.live_panel import PageLine, steering_or_plain
from atoll.cli.page import browser, web
from atoll.node.config.home import Home
from tests.cli.conftest import STATUS

URL = "http://127.0.0.1:4780/"


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Addresses that a browser was asked to open."""
    found: list[str] = []
    monkeypatch.setattr(web, "open_page", lambda url: not found.append(url))
    return found


def test_it_prints_and_opens_the_page_of_the_running_node(atoll, daemon, opened):
    daemon.operator.state = replace(STATUS, web=URL)
    assert atoll("web").out == f"{URL}\n"
    assert opened == [URL]
    assert atoll("web", "--no-open").out == f"{URL}\n"
    said = json.loads(atoll("web", "--no-open", "--json").out)
    assert said == {"type": "web", "url": URL, "opened": False, "steering": URL}
    assert opened == [URL]


def test_the_address_has_a_token_where_it_is_opened_or_must_be(atoll, daemon, opened):
    """What is printed beside an opened browser would be a used address."""
    daemon.operator.state, daemon.operator.token = replace(STATUS, web=URL), "abc"
    assert atoll("web").out == f"{URL}\n"
    assert opened == [f"{URL}#token=abc"]
    ran = atoll("web", "--no-open")
    assert ran.out == f"{URL}#token=abc\n"
    assert "works once, within 10 m 00 s; the page that it opens" in ran.err
    said = json.loads(atoll("web", "--no-open", "--json").out)
    assert (said["url"], said["steering"]) == (URL, f"{URL}#token=abc")
    assert json.loads(atoll("web", "--json").out)["steering"] == ""


def test_start_opens_the_address_with_a_token_and_prints_it_without(daemon, tmp_path):
    daemon.operator.token = "abc"
    assert steering_or_plain(URL, daemon.home) == f"{URL}#token=abc"
    assert steering_or_plain(URL, Home(tmp_path / "nobody")) == URL


def test_without_a_page_it_says_how_to_get_one(atoll, daemon, opened):
    ran = atoll("web")
    assert (ran.code, ran.err.count("\n"), opened) == (78, 1, [])
    assert "`atoll stop --wait`, then `atoll start --open`" in ran.err, "this one runs"
    assert str(daemon.home.config_toml) in ran.err
    daemon.operator.state = replace(STATUS, web_trouble="cannot listen on 127.0.0.1:1: in use; trying again")
    assert "in use" in atoll("web").err


def test_without_a_node_it_says_so(atoll):
    assert atoll("web").code == 3


def test_without_a_browser_the_address_is_printed_all_the_same(atoll, daemon, monkeypatch):
    daemon.operator.state = replace(STATUS, web=URL)
    monkeypatch.setattr(web, "open_page", lambda url: False)
    ran = atoll("web")
    assert (ran.code, ran.out) == (0, f"{URL}\n")
    assert "no browser" in ran.err


@pytest.mark.parametrize(
    ("environ", "platform", "is_there"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "w"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_a_text_browser_never_takes_the_terminal(environ, platform, is_there):
    assert browser.has_screen(environ, platform) is is_there


@pytest.mark.parametrize(
    ("url", "opened"),
    [("http://0.0.0.0:1/", "http://127.0.0.1:1/"), ("http://[::]:1/", "http://[::1]:1/"), (URL, URL)],
)
def test_a_page_on_every_address_is_opened_on_this_machine(url, opened):
    assert browser.reachable(url) == opened


def test_a_browser_that_fails_is_none(monkeypatch):
    def fails(url: str) -> bool:
        raise OSError("no such program")

    monkeypatch.setattr(browser, "has_screen", lambda: True)
    monkeypatch.setattr(browser, "webbrowser", SimpleNamespace(open=fails, Error=ValueError))
    assert browser.open_page(URL) is False


def test_the_line_of_start_comes_once_for_each_address_and_opens_the_first():
    opened: list[str] = []
    line = PageLine(opens=True, open_url=lambda url: not opened.append(url))
    assert line(STATUS) == []
    assert line(replace(STATUS, web=URL)) == [f"page at {URL}"]
    assert line(replace(STATUS, web=URL)) == []
    assert line(replace(STATUS, web="http://127.0.0.1:9/")) == ["page at http://127.0.0.1:9/"]
    assert opened == [URL]


def test_start_without_open_opens_nothing_and_says_where_no_browser_is():
    line = PageLine(opens=False, open_url=lambda url: pytest.fail("opened"))
    assert line(replace(STATUS, web=URL)) == [f"page at {URL}"]
    line = PageLine(opens=True, open_url=lambda url: False)
    assert line(replace(STATUS, web=URL)) == [f"page at {URL} (no browser was found here)"]
