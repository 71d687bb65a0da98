"""The `[limits]` table of a node's configuration, and the caps that apply at a moment of local time. Pure."""

import re
from datetime import datetime, time, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError

LOWEST_BYTES_S = 8_000
"""Below 64 kbit/s deadlines of the wires pass before one frame is through."""
OFF = "off"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(bit|b)(/s|ps)?", re.IGNORECASE)


class Window(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates that replace the normal ones from one time of day to another; the first window that fits applies."""

    days: list[str] = []
    """`mon` … `sun`, the days on which it begins; none: every day."""
    from_: str = msgspec.field(name="from")
    """`HH:MM`, local time. A window whose end is not after its begin goes over midnight."""
    to: str
    up: str = ""
    down: str = ""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates: `20mbit`, `2.5MB/s`, `` for no limit, `off` for no bulk traffic. Sizes: `500GB`, `` for no quota."""

    up: str = ""
    """Cap of what is sent, all protocols together: `20mbit`, `2.5MB/s`; empty: none; `off`: no large transfers."""
    down: str = ""
    """Cap of what is received, in the same form."""
    schedule: list[Window] = []
    """Rates at other times of day, the first one that fits counts: `from` and `to` as `HH:MM`, local time, `days`
    (`mon` … `sun`; none: every day), `up`, `down`."""
    monthly: str = ""
    """Most bytes a month, up and down together, for example `500GB`; empty: no limit. When it is used up only
    control traffic goes on until the next month."""
    monthly_start_day: Annotated[int, Meta(ge=1, le=28)] = 1
    """Day of the month on which that count begins anew, 1 … 28."""


class Caps(msgspec.Struct, frozen=True):
    """The caps that apply at one moment."""

    up_bytes_s: float | None = None
    """None: no limit."""
    down_bytes_s: float | None = None
    bulk_off: str = ""
    """Why bulk traffic stands still; empty: it does not."""


class Limits(msgspec.Struct, frozen=True):
    """A parsed LimitsConfig."""

    always: Caps
    windows: tuple[tuple[frozenset[int], time, time, Caps], ...]
    month_bytes: int | None
    month_start_day: int

    def caps(self, now: datetime) -> Caps:
        """Return the caps at `now`, local time."""
        for days, begin, end, caps in self.windows:
            if _covers(days, begin, end, now):
                return caps
        return self.always


class GivenRates(msgspec.Struct, frozen=True, kw_only=True):
    """What the user of a running node gave instead of the table's rates."""

    up: str | None = None
    """In the form of the table; None: what the table says."""
    down: str | None = None

    def over(self, table: Caps) -> Caps:
        """Return these in place of what the table says now. Raises ConfigError."""
        given = _caps(self.up or "", self.down or "", "the user of this node stopped large transfers")
        # A table that says `off` is overruled by one who names both directions, not by one who names only one.
        is_whole = self.up is not None and self.down is not None
        return Caps(
            table.up_bytes_s if self.up is None else given.up_bytes_s,
            table.down_bytes_s if self.down is None else given.down_bytes_s,
            given.bulk_off or ("" if is_whole else table.bulk_off),
        )


def read_limits(config: LimitsConfig) -> Limits:
    """Parse the table. Raises ConfigError with the line to write instead."""
    return Limits(
        always=_caps(config.up, config.down, "limits.up or limits.down is off"),
        windows=tuple(_window(window) for window in config.schedule),
        month_bytes=parse_size(config.monthly),
        month_start_day=config.monthly_start_day,
    )


def parse_rate(text: str) -> float | None:
    """Parse a rate into bytes per second; None for no limit. Raises ConfigError."""
    if not text.strip():
        return None
    rate = _amount(text, "20mbit or 2.5MB/s")
    if rate < LOWEST_BYTES_S:
        raise ConfigError(f"limits: {text!r} is too slow to take part", hint="write at least 64kbit, or off")
    return rate


def parse_size(text: str) -> int | None:
    """Parse a size into bytes; None for no quota. Raises ConfigError."""
    if not text.strip():
        return None
    size = int(_amount(text, "500GB"))
    if size < 10**6:
        raise ConfigError(f"limits: a quota of {text!r} a month is too small to take part", hint="write 500GB")
    return size


def _amount(text: str, example: str) -> float:
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or match[4] == "b":
        raise ConfigError(f"limits: {text!r} cannot be read", hint=f"write it like {example}")
    number, prefix, binary, unit = float(match[1]), match[2].lower(), match[3], match[4].lower()
    factor = _BINARY.get(prefix, 1) if binary else _FACTORS[prefix]
    return number * factor / (8 if unit == "bit" else 1)


def _caps(up: str, down: str, reason: str) -> Caps:
    is_off = OFF in (up.strip().lower(), down.strip().lower())
    rates = [None if rate.strip().lower() == OFF else parse_rate(rate) for rate in (up, down)]
    return Caps(rates[0], rates[1], reason if is_off else "")


def _window(window: Window) -> tuple[frozenset[int], time, time, Caps]:
    unknown = [day for day in window.days if day.lower() not in DAYS]
    if unknown:
        raise ConfigError(f"limits: no day is named {unknown[0]!r}", hint=f"write {', '.join(DAYS)}")
    days = frozenset(DAYS.index(day.lower()) for day in window.days) or frozenset(range(7))
    reason = f"limits.schedule is off from {window.from_} to {window.to}"
    return days, _time(window.from_), _time(window.to), _caps(window.up, window.down, reason)


def _time(text: str) -> time:
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)|24:00", text.strip())
    if match is None:
        raise ConfigError(f"limits: {text!r} is no time of day", hint="write HH:MM, like 23:30")
    return time(int(match[1]), int(match[2])) if match[1] else time(0)


def _covers(days: frozenset[int], begin: time, end: time, now: datetime) -> bool:
    clock, today = now.time(), now.weekday()
    yesterday = (now - timedelta(days=1)).weekday()
    if begin < end:
        return today in days and begin <= clock < end
    return (today in days and clock >= begin) or (yesterday in days and clock < end)
