"""Tells the node of a home to end, and waits: its lock is free when all that it had to save is on the disk."""

import time
from contextlib import suppress

from atoll.cli.client import NoAnswer, call
from atoll.node.config.home import Home, is_locked
from atoll.protocols.errors import LocalFault, NotRunning
from atoll.protocols.local import control_messages

STOPS_S = 300
"""A node ends within 48 s (the deadlines in node/daemon/app.py), and later only where its disk hangs."""
STARTS_S = 60.0
"""A node answers a few seconds after its start began, also on a busy machine."""
LOOK_S = 0.05
_LOGS = "look at `atoll logs`"


def tell(home: Home, *, finish: bool, within_s: float = STARTS_S) -> control_messages.CommandDone:
    """What the node of `home` says when it is told to stop. One that was starting is told as soon as it answers.

    Raises NotRunning if there is none, and NoAnswer if it does not answer for so many seconds.
    """
    end = time.monotonic() + within_s
    while True:
        try:
            return call(home, control_messages.StopNode(finish), control_messages.CommandDone)
        except NotRunning:
            if not is_locked(home):
                raise
            if time.monotonic() > end:
                raise NoAnswer(f"the node did not answer within {within_s:.0f} s", hint=_LOGS) from None
        time.sleep(LOOK_S)


def wait_for_end(home: Home, *, finish: bool, within_s: float) -> None:
    """Tell the node of `home` to stop; return when none runs.

    Raises NoAnswer if one runs on after that time, LocalFault if it was killed meanwhile.
    """
    end = time.monotonic() + within_s
    with suppress(NotRunning):
        tell(home, finish=finish, within_s=within_s)
    while is_locked(home):
        if time.monotonic() > end:
            raise NoAnswer(f"the node did not end within {within_s:.0f} s", hint=_LOGS)
        time.sleep(LOOK_S)
    if home.control_socket.exists():  # a node removes it whatever ends it, but for a kill or a read-only disk
        raise LocalFault(
            "the node was killed, or its disk refused, before it had stopped",
            hint="`atoll start` goes on from what it saved; until then the others may wait for it",
        )
