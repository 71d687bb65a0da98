"""Bytes of the current month: counted durably, against a quota."""

import logging
from datetime import date, timedelta
from pathlib import Path

import msgspec

from atoll.p2p.system.atomic_files import read_whole, write_whole
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError

log = logging.getLogger(__name__)

_FILE_MAX_BYTES = 256
SURE_S = 3600.0
"""A clock that says a month far from the saved one is believed after so many seconds."""
_NEAR = timedelta(days=366)
"""A node that was off for less has a new month at once; a clock that is wrong (2036) is mostly further ahead."""
_EARLIEST = "2026-01-01"
"""A clock that says less has no battery, and was not put right yet: no node ran before."""


class Month(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Bytes that were used since `begin` (ISO date)."""

    begin: str
    up_bytes: int
    down_bytes: int

    def add(self, up_bytes: int, down_bytes: int, begin: date, said_s: float) -> "Month":
        """Add used bytes. A new month begins at 0; a clock that is set back begins none.

        `begin`: of the month by the clock, which has said so for `said_s` seconds.
        """
        known, new, is_sure = date.fromisoformat(self.begin), begin.isoformat(), said_s >= SURE_S
        if begin > known and (begin <= known + _NEAR or is_sure):
            return Month(new, up_bytes, down_bytes)
        # The clock was far ahead: quotas would last for years. Nothing that was used is forgotten.
        goes_back = is_sure and month_end(begin) < known and new >= _EARLIEST
        return Month(new if goes_back else self.begin, self.up_bytes + up_bytes, self.down_bytes + down_bytes)


def month_begin(today: date, start_day: int) -> date:
    """Return the last `start_day` (1 to 28) that is not after `today`."""
    if today.day >= start_day:
        return today.replace(day=start_day)
    return (today.replace(day=1) - timedelta(days=1)).replace(day=start_day)


def month_end(begin: date) -> date:
    """Return the day on which the next month begins."""
    return (begin.replace(day=1) + timedelta(days=32)).replace(day=begin.day)


def quota_reason(month: Month, quota_bytes: int | None) -> str:
    """Return why bulk traffic stands still; empty while some quota is left."""
    if quota_bytes is None or month.up_bytes + month.down_bytes < quota_bytes:
        return ""
    end = month_end(date.fromisoformat(month.begin))
    return f"the monthly quota of {quota_bytes / 1e9:g} GB is used up until {end.isoformat()}"


def load_month(path: Path, today: date, start_day: int) -> Month:
    """Read the saved month; a damaged file counts from 0 and is logged. Raises DiskFault."""
    fresh = Month(month_begin(today, start_day).isoformat(), 0, 0)
    try:
        data = read_whole(path, max_bytes=_FILE_MAX_BYTES)
        if data is None:
            return fresh
        month = codec.decode(data, Month, max_bytes=_FILE_MAX_BYTES)
        date.fromisoformat(month.begin)
    except (CorruptFault, DecodeError, ValueError):
        log.warning("%s is damaged: this month's traffic is counted from 0", path)
        return fresh
    return month.add(0, 0, month_begin(today, start_day), 0.0)


def save_month(path: Path, month: Month) -> None:
    """Save the month, whole or not at all. Raises DiskFault."""
    write_whole(path, codec.encode(month))
