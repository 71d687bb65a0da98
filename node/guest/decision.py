"""Decides from the user's limits and the newest readings whether the node may train now. Pure."""

from datetime import datetime, timedelta

import msgspec

from atoll.node.config.guest import DAY_MINUTES, GuestLimits, clock_text, minute_of

COOLS_BY_C = 5
"""A GPU that was too hot must cool by so much: at the limit itself the node would stop and go every minute."""


class Readings(msgspec.Struct, frozen=True, kw_only=True):
    """What the sensors said. None: not asked for, or not readable, and then it limits nothing."""

    on_battery: bool | None = None
    idle_s: float | None = None
    """Seconds since somebody used this machine."""
    gpu_c: int | None = None
    """Temperature of the hottest GPU."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the node may train."""

    reason: str = ""
    """Why it may not, and when it goes on, in one line; empty if it may. It does not change while it holds."""
    goes_on: datetime | None = None
    """When the reason ends, in local time; None: there is none, or nobody knows."""
    is_hot: bool = False
    """Whether a GPU was too hot and has not cooled down yet."""


MAY_TRAIN = Verdict()


def may_train(limits: GuestLimits, readings: Readings, now: datetime, before: Verdict = MAY_TRAIN) -> Verdict:
    """Judge one moment. `now`: local time; `before`: the verdict before this one."""
    is_hot = _is_hot(limits, readings, was_hot=before.is_hot)
    if limits.hours and not any(hours.covers(minute_of(now)) for hours in limits.hours):
        return _outside_hours(limits, now, is_hot)
    if limits.mains_only and readings.on_battery:
        return Verdict(reason="this machine runs on battery; goes on with mains power", is_hot=is_hot)
    if limits.idle_s is not None and readings.idle_s is not None and readings.idle_s < limits.idle_s:
        end = f"goes on when nobody has for {_length(limits.idle_s)}"
        left = timedelta(seconds=limits.idle_s - max(0.0, readings.idle_s))
        return Verdict(reason=f"somebody uses this machine; {end}", goes_on=now + left, is_hot=is_hot)
    if is_hot and limits.gpu_most_c is not None:
        cool = f"goes on at {limits.gpu_most_c - COOLS_BY_C} °C"
        return Verdict(reason=f"a GPU is hotter than {limits.gpu_most_c} °C; {cool}", is_hot=True)
    return Verdict(is_hot=is_hot)


def _outside_hours(limits: GuestLimits, now: datetime, is_hot: bool) -> Verdict:
    minute = minute_of(now)
    wait = min((hours.begin - minute) % DAY_MINUTES for hours in limits.hours)
    text = ", ".join(hours.text() for hours in limits.hours)
    return Verdict(
        reason=f"outside its hours ({text}); goes on at {clock_text((minute + wait) % DAY_MINUTES)}",
        goes_on=now.replace(second=0, microsecond=0) + timedelta(minutes=wait),
        is_hot=is_hot,
    )


def _is_hot(limits: GuestLimits, readings: Readings, *, was_hot: bool) -> bool:
    if limits.gpu_most_c is None or readings.gpu_c is None:
        return False
    return readings.gpu_c > limits.gpu_most_c - (COOLS_BY_C if was_hot else 0)


def _length(seconds: int) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds % unit == 0:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"
