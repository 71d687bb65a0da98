"""Tells the service manager that the node is ready, lives and ends: systemd's notification protocol.

A datagram of `NAME=value` lines to the Unix socket in NOTIFY_SOCKET (`sd_notify(3)`). A few lines of socket code,
because the packages that wrap them are no shorter. Nothing that is computed depends on it: a manager that is gone,
or reads too slowly, costs a line in the log.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

log = logging.getLogger(__name__)

SOCKET, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
BEATS = 2
"""Signs of life in each interval of the watchdog: one may be late by as much again."""


class Notice:
    """The way to one service manager; none where nobody listens."""

    def __init__(self, address: str, watchdog_s: float | None, *, until_ready: bool = False) -> None:
        """`address` as in NOTIFY_SOCKET, empty for none. `watchdog_s`: seconds without a sign that end a node.

        `until_ready`: the listener waits for readiness and is gone after it, as the command `start --detach` is.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = watchdog_s / BEATS if watchdog_s else None
        self._until_ready = until_ready
        self._next: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """The node is up, by its own event."""
        self._send(f"READY=1\nMAINPID={os.getpid()}")
        if self._until_ready:
            self._address = ""

    def start_beating(self, loop: asyncio.AbstractEventLoop) -> None:
        """Signs of life from the loop itself: where it hangs, they end."""
        if self._every_s is not None:
            self._send("WATCHDOG=1")
            self._next = loop.call_later(self._every_s, self.start_beating, loop)

    def stop(self) -> None:
        """The node ends; what it still has to save may take a while."""
        self._send("STOPPING=1")
        if self._next is not None:
            self._next.cancel()

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
                link.setblocking(False)
                link.sendto(state.encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", state.split("\n")[0], error)


def notice_from(environ: MutableMapping[str, str], pid: int, *, until_ready: bool = False) -> Notice:
    """What the environment asks for. Taken out of it, so that no child process speaks for the node.

    `until_ready`: see Notice. Such a listener asks for no signs of life.
    """
    address = environ.pop(SOCKET, "")
    interval, meant_for = environ.pop(WATCHDOG_US, ""), environ.pop(WATCHDOG_PID, "")
    is_ours = meant_for in ("", str(pid)) and interval.isascii() and interval.isdigit() and int(interval) > 0
    beats = is_ours and not until_ready
    return Notice(address, int(interval) / 1e6 if beats else None, until_ready=until_ready)


@contextmanager
def notifying(notice: Notice) -> Iterator[Callable[[], None]]:
    """Signs of life while the block runs; the caller calls what it gets when the node is ready. Needs a loop."""
    notice.start_beating(asyncio.get_running_loop())
    try:
        yield notice.ready
    finally:
        notice.stop()
