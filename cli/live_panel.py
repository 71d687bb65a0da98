"""What `start` shows while the daemon works: a live panel on a terminal, plain or JSON lines elsewhere.

A thread of its own that asks over the control socket, like any operator: a terminal that stands still
(Ctrl-S, a slow line) can never stop the daemon's loop.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from atoll.cli.client import stream
from atoll.cli.command_group import drop_output
from atoll.cli.commands.status import one_line
from atoll.cli.formatting import print_json
from atoll.cli.page.browser import open_page
from atoll.cli.page.web import steering_url
from atoll.node.config.home import Home
from atoll.protocols.errors import AtollError
from atoll.protocols.local.control_messages import Status, Watch

RETRY_S = 0.2
PLAIN_EVERY_S = 2.0
"""Interval of the statuses of which plain lines are made."""
LINE_EVERY_S = 10.0
"""Interval of plain lines, whatever happened; trouble that is new has one at once."""
JOIN_S = 2.0


def seed_lines(now: Status) -> list[str]:
    """Lines with which others join through this node, without an invite."""
    return [f"others join with --peer {maddr}/p2p/{now.peer}" for maddr in now.addresses]


Words = Callable[[Status], list[str]]


@contextmanager
def shown(
    home: Home, *, as_json: bool, plain: bool, words: Words = seed_lines, opens: bool = False
) -> Iterator[None]:
    """Show the node of `home` until the block ends; `words` tell how to join it when its addresses changed.

    `opens`: the web page is opened in a browser once it is served.
    """
    ended = threading.Event()
    if as_json:
        show: Callable[[Home, threading.Event, Words, Words], None] = _json_lines
    elif plain or not sys.stdout.isatty():
        show = _plain_lines
    else:
        show = _live_panel
    page = PageLine(opens=opens, open_url=lambda url: open_page(steering_or_plain(url, home)))

    def show_until_unread() -> None:
        try:
            show(home, ended, words, page)
        except OSError:  # `start | head` or a full disk: nobody reads any more, and the node works on
            drop_output()

    thread = threading.Thread(target=show_until_unread, name="panel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(JOIN_S)


def steering_or_plain(url: str, home: Home) -> str:
    """The page's address with a token, or without where the node does not answer."""
    try:
        return steering_url(url, home)
    except AtollError:
        return url


class PageLine:
    """The line about the web page, once it is served; opens the page then, if the user asked for that."""

    def __init__(self, *, opens: bool, open_url: Callable[[str], bool] = open_page) -> None:
        self._opens = opens
        self._open_url = open_url
        self._url = ""

    def __call__(self, now: Status) -> list[str]:
        """The line, if the address is a new one."""
        if not now.web or now.web == self._url:
            return []
        is_wanted, self._url = self._opens and not self._url, now.web
        how = " (no browser was found here)" if is_wanted and not self._open_url(now.web) else ""
        return [f"page at {now.web}{how}"]


def show_cursor() -> None:
    """Show the terminal's cursor, which a live panel hides until its end."""
    if sys.stdout.isatty():
        os.write(sys.stdout.fileno(), b"\x1b[?25h")


def is_news(now: Status, before: Status | None, since_s: float) -> bool:
    """Whether a status is worth a line, `since_s` seconds after the last one that was."""
    return before is None or now.trouble != before.trouble or since_s >= LINE_EVERY_S


def new_addresses(now: Status, before: Status | None, words: Words = seed_lines) -> list[str]:
    """Lines about how to join through our addresses, when they have changed."""
    if not now.addresses or (before is not None and before.addresses == now.addresses):
        return []
    return words(now)


def _statuses(home: Home, ended: threading.Event, every_s: float = 1.0) -> Iterator[Status]:
    """A status at this interval until the daemon or the block ends; waits for a daemon that is starting."""
    while not ended.is_set():
        try:
            for now in stream(home, Watch(every_s), Status):
                yield now
                if ended.is_set():
                    return
        except AtollError:  # not up yet, or on its way down: start's own error tells the user
            ended.wait(RETRY_S)


def _json_lines(home: Home, ended: threading.Event, words: Words, page: Words) -> None:
    for now in _statuses(home, ended):
        page(now)
        print_json(now)


def _plain_lines(home: Home, ended: threading.Event, words: Words, page: Words) -> None:
    before: Status | None = None
    at = 0.0
    for now in _statuses(home, ended, PLAIN_EVERY_S):
        for line in (*page(now), *new_addresses(now, before, words)):
            click.echo(line)
        if is_news(now, before, time.monotonic() - at):
            click.echo(one_line(now))
            before, at = now, time.monotonic()


def _live_panel(home: Home, ended: threading.Event, words: Words, page: Words) -> None:
    # Its library takes 17 ms to import, which a start without a terminal need not.
    from atoll.cli.node_commands.panel_screen import painting

    with painting() as paint:
        before: Status | None = None
        for now in _statuses(home, ended):
            paint(now, [*page(now), *new_addresses(now, before, words)])
            before = now
