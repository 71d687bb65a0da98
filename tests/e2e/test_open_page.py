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
    poll("a browser was opened", opened.exists)
    url = opened.read_text().strip()
    assert url.startswith("http://127.0.0.1:")
    poll("the address is printed", lambda: f"page at {url}\n" in node.said())
    with urllib.request.urlopen(url, timeout=HANGS_S) as reply:
        assert b"<title>atoll</title>" in reply.read()
    assert node.atoll("web", "--no-open").out == f"{url}\n"
    assert opened.read_text().count("\n") == 1
    assert node.atoll("web").out == f"{url}\n"
    assert opened.read_text() == f"{url}\n{url}\n"
    node.stop()
