"""Tells the node of a home to end, and waits: its lock is free when all that it had to save is on the disk."""

import fcntl
import os
import time

from atoll.cli.client import NoAnswer, call
from atoll.node.config.home import Home
from atoll.protocols.errors import NotRunning
from atoll.protocols.local import control_messages

STOPS_S = 300
"""A node ends within 48 s (the deadlines in node/daemon/app.py), and later only where its disk hangs."""
STARTS_S = 60.0
"""A node answers a few seconds after its start began, also on a busy machine."""
LOOK_S = 0.05


def is_locked(home: Home) -> bool:
    """Whether a node of `home` runs, answers or not. The lock is tried and given back, nothing is written."""
    try:
        descriptor = os.open(home.lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def tell(home: Home, *, finish: bool) -> control_messages.CommandDone:
    """What the node of `home` says when it is told to stop. One that was starting is told as soon as it answers.

    Raises NotRunning if there is none, and NoAnswer.
    """
    end = time.monotonic() + STARTS_S
    while True:
        try:
            return call(home, control_messages.StopNode(finish), control_messages.CommandDone)
        except NotRunning:
            if not is_locked(home):
                raise
            if time.monotonic() > end:
                raise NoAnswer(
                    f"a node starts or ends in {home.root}, and did not answer within {STARTS_S:.0f} s",
                    hint="`atoll stop --wait` goes on for longer",
                ) from None
        time.sleep(LOOK_S)


def wait_for_end(home: Home, *, finish: bool, within_s: float) -> None:
    """Return when no node of `home` runs. One that was starting is told to stop as soon as it answers.

    Raises NoAnswer if it runs on after so many seconds.
    """
    end = time.monotonic() + within_s
    is_told = False
    while is_locked(home):
        if time.monotonic() > end:
            raise NoAnswer(f"the node did not end within {within_s:.0f} s", hint="look at `atoll logs`")
        if not is_told:
            is_told = _tell(home, finish)
        time.sleep(LOOK_S)


def _tell(home: Home, finish: bool) -> bool:
    """Whether the node was there to be told."""
    try:
        call(home, control_messages.StopNode(finish), control_messages.CommandDone)
    except NotRunning:
        return False
    return True
