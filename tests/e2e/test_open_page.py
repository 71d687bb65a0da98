"""`start --open`: the page is on loopback, its address printed, and a browser opened; `atoll web` finds it."""

import urllib.request
from pathlib import Path

import pytest

from tests.waiting import HANGS_S, poll

pytestmark = [pytest.mark.swarm, pytest.mark.xdist_group("swarm")]


def test_start_opens_the_page_that_it_serves(node, tmp_path: Path, monkeypatch):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >> {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    node.new_run()
    node.start("--open").up()
    poll("a browser was opened", lambda: opened.exists() and opened.read_text().endswith("\n"))
    steering = opened.read_text().strip()
    url, _, token = steering.partition("#token=")
    assert url.startswith("http://127.0.0.1:")
    assert token, "this browser may give orders"
    poll("the address is printed", lambda: f"page at {url}\n" in node.said())
    assert token not in node.said(), "the log has no secret"
    with urllib.request.urlopen(url, timeout=HANGS_S) as reply:
        assert b"<title>atoll</title>" in reply.read()
    printed = node.atoll("web", "--no-open").out
    assert printed.startswith(f"{url}#token=")
    assert opened.read_text() == f"{steering}\n"
    assert node.atoll("web").out == f"{url}\n"
    poll("a browser was opened again", lambda: opened.read_text().count("\n") == 2)
    first, second = opened.read_text().splitlines()
    assert first == steering
    assert second.startswith(f"{url}#token=")
    assert len({first, printed.strip(), second}) == 3, "a token works once"
    node.stop()
