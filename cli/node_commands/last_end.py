"""How the last node of a home ended, by what it left on the disk."""

from contextlib import suppress

import msgspec

from atoll.node.config.home import Home, is_locked
from atoll.node.daemon.telemetry.logfile import LogTail
from atoll.node.daemon.telemetry.round_log import JOURNAL_FILE
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.errors import LocalFault

_GOES_ON = "`atoll start` goes on from what it saved"
LINES = 200
"""Newest lines of the journal that are read: a node writes few after it began to stop."""


class _Event(msgspec.Struct):
    event: str
    error: str = ""
    time: float = 0.0
    unsaved: str = ""
    """Why its worker did not save all that it had; of an end."""


def last_end(home: Home) -> str:
    """What became of the newest node of this home, as a clause; empty if it is there, or nobody knows.

    Raises DiskFault.
    """
    if is_locked(home):
        return ""
    if home.control_socket.exists():  # a node removes it unless it is killed, or told to stop twice
        return "the last one was killed, told to stop twice, or lost its power or its disk"
    match _newest_end(home):
        case _Event("stopping", unsaved=""):
            return "the last one that came up was stopped"
        case _Event("stopping", unsaved=why):
            return f"the last one that came up was stopped, and lost what was not saved yet: {why}"
        case _Event("failed", error):
            return f"the last one ended: {error}"
        case _Event("crashed", error):
            return f"a bug ended the last one, see `atoll logs`: {error}"
    return ""


def check_end(home: Home, since: float) -> None:
    """Raise LocalFault if the node that came up after this Unix time failed, or lost what it had to save.

    Its fault may be older than the command that waited for its end.
    """
    found = _newest_end(home)
    if found is None or found.time < since:
        return  # a node that is told early writes none, and an older one may have failed
    if found.event != "stopping":
        raise LocalFault(f"the node failed: {found.error}", hint=_GOES_ON)
    if found.unsaved:
        raise LocalFault(f"the node lost what was not saved yet: {found.unsaved}", hint=_GOES_ON)


def started_at(home: Home) -> float:
    """Unix time at which the node that holds the home's lock took it. Raises DiskFault."""
    with disk(home.lock):
        return home.lock.stat().st_mtime  # it writes its pid then, and nothing later


def _newest_end(home: Home) -> _Event | None:
    journals = sorted((home.root / "runs").glob(f"*/{JOURNAL_FILE}"), key=lambda path: path.stat().st_mtime)
    unsaved = ""
    for line in reversed(LogTail(journals[-1]).last_bytes(LINES) if journals else []):
        with suppress(msgspec.MsgspecError):
            found = msgspec.json.decode(line, type=_Event)
            if found.event == "not_saved":
                unsaved = found.error
            elif found.event in ("stopping", "failed", "crashed"):
                return msgspec.structs.replace(found, unsaved=unsaved)
    return None
