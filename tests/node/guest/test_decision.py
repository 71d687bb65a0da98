"""When a guest may train: hours over midnight, battery, users, heat that comes and goes. Pure."""

from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.config.guest import GuestConfig, GuestLimits, HourRange, read_guest
from atoll.node.guest.decision import MAY_TRAIN, Readings, Verdict, may_train
from atoll.protocols.errors import ConfigError

NIGHT = read_guest(GuestConfig(hours="22:00-07:00"))
NOTHING = Readings()


def at(clock: str) -> datetime:
    return datetime.fromisoformat(f"2026-03-09T{clock}")


@pytest.mark.parametrize(
    ("clock", "may"),
    [("21:59:59", False), ("22:00:00", True), ("00:00:00", True), ("06:59:59", True), ("07:00:00", False)],
)
def test_hours_over_midnight(clock, may):
    assert (may_train(NIGHT, NOTHING, at(clock)) == MAY_TRAIN) is may


def test_outside_its_hours_it_says_when_it_goes_on():
    verdict = may_train(NIGHT, NOTHING, at("12:30:05"))
    assert verdict.reason == "outside its hours (22:00 to 07:00); goes on at 22:00"
    assert verdict.goes_on == at("22:00:00")
    both = read_guest(GuestConfig(hours=" 12:00 - 13:00,22:00-24:00"))
    verdict = may_train(both, NOTHING, at("23:59:00").replace(hour=1))
    assert verdict.reason == "outside its hours (12:00 to 13:00, 22:00 to 24:00); goes on at 12:00"
    assert may_train(both, NOTHING, at("13:00:00")).goes_on == at("22:00:00")
    assert may_train(both, NOTHING, at("23:59:59")) == MAY_TRAIN
    assert may_train(read_guest(GuestConfig(hours="7:00-8:00")), NOTHING, at("09:00:00")).goes_on == at(
        "07:00:00"
    ) + timedelta(days=1)


@given(st.integers(0, 1439), st.integers(1, 1440), st.datetimes(datetime(2026, 1, 1), datetime(2027, 1, 1)))
def test_it_goes_on_exactly_when_it_says(begin, end, now):
    if begin == end % 1440:
        return
    limits = GuestLimits(hours=(HourRange(begin, end),))
    verdict = may_train(limits, NOTHING, now)
    if verdict.goes_on is None:
        assert not verdict.reason
        return
    assert may_train(limits, NOTHING, verdict.goes_on) == MAY_TRAIN
    assert may_train(limits, NOTHING, verdict.goes_on - timedelta(seconds=1)).reason == verdict.reason
    assert now < verdict.goes_on <= now + timedelta(days=1)


def test_battery():
    limits = read_guest(GuestConfig(battery="pause"))
    held = may_train(limits, Readings(on_battery=True), at("12:00:00"))
    assert held.reason == "this machine runs on battery; goes on with mains power"
    assert may_train(limits, Readings(on_battery=False), at("12:00:00"), held) == MAY_TRAIN
    assert may_train(limits, NOTHING, at("12:00:00"), held) == MAY_TRAIN, "what cannot be read limits nothing"
    assert may_train(GuestLimits(), Readings(on_battery=True, idle_s=0.0, gpu_c=99), at("12:00:00")) == MAY_TRAIN


def test_somebody_uses_the_machine():
    limits = read_guest(GuestConfig(idle_after="10m"))
    held = may_train(limits, Readings(idle_s=599.0), at("12:00:00"))
    assert held.reason == "somebody uses this machine; goes on when nobody has for 10 min"
    assert held.goes_on == at("12:00:01")
    again = may_train(limits, Readings(idle_s=3.0), at("12:00:00"), held)
    assert again.reason == held.reason, "the reason stays while it holds: no event at each look"
    assert may_train(limits, Readings(idle_s=600.0), at("12:00:00"), held) == MAY_TRAIN
    assert (
        "for 1 h"
        in may_train(read_guest(GuestConfig(idle_after="1h")), Readings(idle_s=-5.0), at("12:00:00")).reason
    )
    assert (
        "for 90 s"
        in may_train(read_guest(GuestConfig(idle_after="90s")), Readings(idle_s=5.0), at("12:00:00")).reason
    )


def temperatures(limits: GuestLimits, *readings: int | None) -> list[bool]:
    """Whether the node rests at each of these temperatures, one after the other."""
    verdict, rests = MAY_TRAIN, []
    for gpu_c in readings:
        verdict = may_train(limits, Readings(gpu_c=gpu_c), at("12:00:00"), verdict)
        rests.append(bool(verdict.reason))
    return rests


def test_a_hot_gpu_must_cool_down_by_five_degrees():
    limits = read_guest(GuestConfig(gpu_most_c=80))
    assert temperatures(limits, 80, 81, 80, 76, 75, 80, 81) == [False, True, True, True, False, False, True]
    assert temperatures(limits, 81, None, 80) == [True, False, False]
    held = may_train(limits, Readings(gpu_c=81), at("12:00:00"))
    assert held.reason == "a GPU is hotter than 80 °C; goes on at 75 °C"


def test_heat_is_remembered_while_another_reason_is_named():
    limits = read_guest(GuestConfig(gpu_most_c=80, hours="22:00-07:00"))
    held = may_train(limits, Readings(gpu_c=85), at("21:59:00"))
    assert held.reason.startswith("outside its hours")
    assert may_train(limits, Readings(gpu_c=78), at("22:00:00"), held).reason.startswith("a GPU is hotter")
    assert may_train(limits, Readings(gpu_c=75), at("22:00:00"), held) == Verdict()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"hours": "25:00-07:00"}, "guest.hours: '25:00-07:00' is no range of hours; write it like 22:00-07:00"),
        ({"hours": "22:00"}, "'22:00' is no range"),
        ({"hours": "10pm-7am"}, "'10pm-7am' is no range"),
        ({"hours": "22:60-07:00"}, "is no range"),
        ({"hours": "24:00-07:00"}, "is no range"),
        ({"hours": "22:00-07:00,"}, "'' is no range"),
        ({"hours": "-1:00-07:00"}, "is no range"),
        ({"hours": "22:00-24:01"}, "is no range"),
        ({"hours": "٢٢:00-07:00"}, "is no range"),
        ({"hours": "08:00-08:00"}, "has no length; for the whole day leave it out"),
        ({"hours": "00:00-00:00"}, "has no length"),
        ({"hours": ",".join(["01:00-02:00"] * 17)}, "more than 16 ranges"),
        ({"idle_after": "10"}, "guest.idle_after: '10' is no length of time up to 24h; write it like 10m"),
        ({"idle_after": "0m"}, "is no length"),
        ({"idle_after": "25h"}, "is no length"),
        ({"idle_after": "-5m"}, "is no length"),
        ({"gpu_most_c": 20}, "guest.gpu_most_c = 20 is outside 30 … 110"),
        ({"gpu_most_c": -80}, "outside 30"),
        ({"nice": -5}, "guest.nice = -5 is outside 0 … 19"),
        ({"nice": 20}, "outside 0"),
    ],
)
def test_what_cannot_be_meant_is_one_line(table, said):
    with pytest.raises(ConfigError) as caught:
        read_guest(GuestConfig(**table))
    assert said in caught.value.line()
    assert "\n" not in caught.value.line()


def test_the_whole_day_is_a_range():
    limits = read_guest(GuestConfig(hours="00:00-24:00"))
    assert all(may_train(limits, NOTHING, at(f"{hour:02}:30:00")) == MAY_TRAIN for hour in range(24))


def test_niceness_alone_makes_no_node_rest():
    assert not read_guest(GuestConfig(nice=19)).limits_anything
    assert read_guest(GuestConfig(battery="pause")).limits_anything
