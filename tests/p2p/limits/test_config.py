"""What the user may write under `[limits]`, and what holds when."""

from datetime import datetime

import msgspec
import pytest

from atoll.p2p.limits.config import Caps, GivenRates, LimitsConfig, parse_rate, parse_size, read_limits
from atoll.protocols.errors import ConfigError

TABLE = Caps(1e6, 5e5, "off at night")

RATES = {
    "": None,
    "  ": None,
    "20mbit": 2.5e6,
    "20 Mbit/s": 2.5e6,
    "1gbit": 1.25e8,
    "512kbps": ConfigError,
    "2.5MB/s": 2.5e6,
    "1MiB/s": 1048576.0,
    "800kB/s": 8e5,
    "8000B": 8e3,
    "20Mb": ConfigError,
    "20": ConfigError,
    "-1MB/s": ConfigError,
    "fast": ConfigError,
    "1kbit": ConfigError,
    "0MB/s": ConfigError,
    "1e9B": ConfigError,
}


@pytest.mark.parametrize("text", RATES)
def test_rates(text: str) -> None:
    expected = RATES[text]
    if expected is ConfigError:
        with pytest.raises(ConfigError) as caught:
            parse_rate(text)
        assert caught.value.hint
    else:
        assert parse_rate(text) == expected


@pytest.mark.parametrize(("text", "size"), [("", None), ("500GB", 500 * 10**9), ("1TiB", 2**40), ("0.5tb", None)])
def test_sizes(text: str, size: int | None) -> None:
    if text == "0.5tb":
        with pytest.raises(ConfigError):
            parse_size(text)
    else:
        assert parse_size(text) == size


def config(**fields: object) -> LimitsConfig:
    return msgspec.convert(fields, LimitsConfig)


NIGHT = {"from": "22:30", "to": "06:00", "up": "100mbit"}
WORK = {"days": ["mon", "fri"], "from": "9:00", "to": "17:00", "up": "off", "down": "8mbit"}
WEEKEND = {"days": ["Sat"], "from": "20:00", "to": "20:00"}


@pytest.mark.parametrize(
    ("moment", "up", "is_off"),
    [
        ("2026-11-23 09:00", None, True),  # a Monday
        ("2026-11-23 16:59", None, True),
        ("2026-11-23 17:00", 1.25e6, False),
        ("2026-11-24 12:00", 1.25e6, False),  # a Tuesday
        ("2026-11-24 22:30", 12.5e6, False),
        ("2026-11-24 23:59", 12.5e6, False),
        ("2026-11-25 00:00", 12.5e6, False),
        ("2026-11-25 06:00", 1.25e6, False),
        ("2026-11-28 21:00", None, False),  # a Saturday: all day from 20:00 on
        ("2026-11-29 19:59", None, False),
        ("2026-11-29 20:00", 1.25e6, False),
    ],
)
def test_the_first_window_that_fits_holds(moment: str, up: float | None, is_off: bool) -> None:
    limits = read_limits(config(up="10mbit", schedule=[WEEKEND, WORK, NIGHT]))
    caps = limits.caps(datetime.fromisoformat(moment))
    assert (caps.up_bytes_s, bool(caps.bulk_off)) == (up, is_off)
    if is_off:
        assert caps.down_bytes_s == 1e6
        assert "17:00" in caps.bulk_off


def test_a_window_over_midnight_belongs_to_the_day_on_which_it_begins() -> None:
    limits = read_limits(config(schedule=[{**NIGHT, "days": ["fri"]}]))
    assert limits.caps(datetime(2026, 11, 28, 5)).up_bytes_s == 12.5e6, "Saturday morning"
    assert limits.caps(datetime(2026, 11, 27, 5)) == Caps(), "Friday morning"
    assert limits.caps(datetime(2026, 11, 28, 23)) == Caps(), "Saturday night"


@pytest.mark.parametrize(
    "wrong",
    [
        {"schedule": [{"from": "25:00", "to": "06:00"}]},
        {"schedule": [{"from": "noon", "to": "06:00"}]},
        {"schedule": [{"days": ["funday"], "from": "1:00", "to": "06:00"}]},
        {"monthly": "12"},
        {"monthly": "1MB", "up": "junk"},
        {"monthly": "1B"},
    ],
)
def test_what_cannot_be_read_is_refused_with_a_remedy(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_limits(config(**wrong))
    assert caught.value.hint


def test_no_limit_is_no_limit() -> None:
    assert read_limits(LimitsConfig()).caps(datetime(2026, 1, 1)) == Caps()


@pytest.mark.parametrize(
    ("given", "caps"),
    [
        ({}, TABLE),
        ({"up": "16mbit"}, Caps(2e6, 5e5, "off at night")),
        ({"up": "", "down": "8mbit"}, Caps(None, 1e6, "")),
        ({"up": "off"}, Caps(None, 5e5, "the user of this node stopped large transfers")),
        ({"down": "OFF"}, Caps(1e6, None, "the user of this node stopped large transfers")),
    ],
)
def test_rates_that_the_user_gives_replace_those_of_the_table(given: dict[str, str], caps: Caps) -> None:
    assert GivenRates(**given).over(TABLE) == caps
