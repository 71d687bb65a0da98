"""How the last node of a home ended, by what it left on the disk."""

from contextlib import suppress

import msgspec

from atoll.cli.node_commands.ending import is_locked
from atoll.node.config.home import Home
from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.node.daemon.telemetry.round_log import JOURNAL_FILE
from atoll.protocols.errors import LocalFault

LINES = 200
"""Newest lines of the journal that are read: a node writes few after it began to stop."""


class _Event(msgspec.Struct):
    event: str
    error: str = ""
    time: float = 0.0


def last_end(home: Home) -> str:
    """What became of the newest node of this home, as a clause; empty if nobody knows. Raises DiskFault."""
    if is_locked(home):
        return "one starts or ends there and does not answer yet"
    if home.control_socket.exists():  # a node removes it unless it is killed, or told to stop twice
        return "the last one was killed, told to stop twice, or lost its power or its disk"
    match _newest_end(home):
        case _Event("stopping"):
            return "the last one that came up was stopped"
        case _Event("failed", error):
            return f"the last one ended: {error}"
        case _Event("crashed", error):
            return f"a bug ended the last one, see `atoll logs`: {error}"
    return ""


def check_end(home: Home, since: float) -> None:
    """Raise LocalFault if the node that ended since this Unix time failed, though it was told to stop."""
    found = _newest_end(home)
    if found is not None and found.event != "stopping" and found.time >= since:
        raise LocalFault(
            f"the node failed while it stopped: {found.error}", hint="`atoll start` goes on from what it saved"
        )


def _newest_end(home: Home) -> _Event | None:
    journals = sorted((home.root / "runs").glob(f"*/{JOURNAL_FILE}"), key=lambda path: path.stat().st_mtime)
    for line in reversed(LogTail(journals[-1]).last_bytes(LINES) if journals else []):
        with suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(line, type=_Event)
            if found.event in ("stopping", "failed", "crashed"):
                return found
    return None
