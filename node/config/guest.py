"""The `[guest]` table of a node's configuration: when, and under which conditions, the node may train. Pure."""

import re
from datetime import datetime, time
from typing import Literal

import msgspec

from atoll.protocols.errors import ConfigError, check_range

DAY_MINUTES = 24 * 60
MAX_RANGES = 16
LONGEST_IDLE_S = 86_400
COOLEST_C, HOTTEST_C = 30, 110
"""A limit below the first is met by no GPU; above the second, GPUs switch themselves off."""
_RANGE = re.compile(r"([0-9]{1,2}):([0-9]{2})\s*-\s*([0-9]{1,2}):([0-9]{2})")
_LENGTH = re.compile(r"([1-9][0-9]{0,5})\s*([smh])")
_UNITS_S = {"s": 1, "m": 60, "h": 3600}


class GuestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the node may train (docs/guest.md). It rests otherwise, and goes on by itself."""

    hours: str = ""
    """Hours in which it trains, local time: `22:00-07:00`; several with commas; empty: always."""
    battery: Literal["train", "pause"] = "train"
    """`pause`: it trains on mains power only."""
    idle_after: str = ""
    """Trains once nobody has used this machine for so long: `10m`, `1h`; empty: always."""
    gpu_most_c: int = 0
    """Rests when a GPU of this machine is hotter than that, in °C, until it has cooled down by 5; 0: never."""
    gpu_memory: int = 0
    """Most of a GPU's memory that the worker may take, in percent of all it has, 1 … 100; 0: all that is free."""
    nice: int = 0
    """Niceness of the worker's processes, 0 … 19: at 19, other programs get the CPU first."""


class HourRange(msgspec.Struct, frozen=True):
    """Minutes of a day in which the node may train. A range whose end is before its begin goes over midnight."""

    begin: int
    """0 … 1439."""
    end: int
    """1 … 1440, not included."""

    def covers(self, minute: int) -> bool:
        """Return whether a minute of the day, 0 … 1439, lies in the range."""
        if self.begin < self.end:
            return self.begin <= minute < self.end
        return minute >= self.begin or minute < self.end

    def text(self) -> str:
        """Return the range as people read it: `22:00 to 07:00`."""
        return f"{clock_text(self.begin)} to {clock_text(self.end)}"


class GuestLimits(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed GuestConfig, without what concerns the worker's processes only."""

    hours: tuple[HourRange, ...] = ()
    """Empty: the whole day."""
    mains_only: bool = False
    idle_s: int | None = None
    """None: whoever uses the machine does not matter."""
    gpu_most_c: int | None = None

    @property
    def limits_anything(self) -> bool:
        """Whether the node must ever rest because of these limits."""
        return self != GuestLimits()


def read_guest(config: GuestConfig) -> GuestLimits:
    """Parse the table. Raises ConfigError with the line to write instead."""
    check_range("guest.nice", config.nice, 0, 19)
    if config.gpu_memory:
        check_range("guest.gpu_memory", config.gpu_memory, 1, 100)
    if config.gpu_most_c:
        check_range("guest.gpu_most_c", config.gpu_most_c, COOLEST_C, HOTTEST_C)
    ranges = config.hours.split(",") if config.hours.strip() else []
    if len(ranges) > MAX_RANGES:
        raise ConfigError(f"guest.hours: more than {MAX_RANGES} ranges")
    return GuestLimits(
        hours=tuple(_hour_range(part.strip()) for part in ranges),
        mains_only=config.battery == "pause",
        idle_s=_seconds(config.idle_after),
        gpu_most_c=config.gpu_most_c or None,
    )


def minute_of(now: datetime | time) -> int:
    """Return the minute of the day, 0 … 1439."""
    return 60 * now.hour + now.minute


def clock_text(minute: int) -> str:
    """Return a minute of the day, 0 … 1440, as `HH:MM`."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _hour_range(text: str) -> HourRange:
    match = _RANGE.fullmatch(text)
    numbers = tuple(map(int, match.groups())) if match else (99, 0, 99, 0)
    begin, end = 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]
    if not (max(numbers[1], numbers[3]) < 60 and begin < DAY_MINUTES and end <= DAY_MINUTES):
        raise ConfigError(f"guest.hours: {text!r} is no range of hours", hint="write it like 22:00-07:00")
    if begin == end % DAY_MINUTES and (begin, end) != (0, DAY_MINUTES):
        raise ConfigError(f"guest.hours: {text!r} has no length", hint="for the whole day leave it out")
    return HourRange(begin, end or DAY_MINUTES)


def _seconds(text: str) -> int | None:
    if not text.strip():
        return None
    match = _LENGTH.fullmatch(text.strip())
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= LONGEST_IDLE_S:
        raise ConfigError(f"guest.idle_after: {text!r} is no length of time up to 24h", hint="write it like 10m")
    return seconds
