"""The month's count: when it begins, that it survives, what a full quota says."""

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.limits.monthly_quota import (
    SURE_S,
    Month,
    load_month,
    month_begin,
    month_end,
    quota_reason,
    save_month,
)


@given(st.dates(date(2000, 1, 1), date(2100, 1, 1)), st.integers(1, 28))
def test_every_day_is_in_one_month(today: date, start_day: int) -> None:
    begin = month_begin(today, start_day)
    assert begin <= today < month_end(begin)
    assert begin.day == month_end(begin).day == start_day
    assert month_begin(month_end(begin), start_day) == month_end(begin)


def test_a_new_month_begins_at_zero_and_a_clock_set_back_does_not() -> None:
    month = Month("2026-11-05", 10, 20)
    assert month.add(1, 2, date(2026, 11, 5), 0.0) == Month("2026-11-05", 11, 22)
    assert month.add(1, 2, date(2026, 12, 5), 0.0) == Month("2026-12-05", 1, 2)
    assert month.add(1, 2, date(2026, 10, 5), SURE_S) == Month("2026-11-05", 11, 22)


@pytest.mark.parametrize("booted", [date(1970, 1, 5), date(2020, 1, 5)])
def test_a_machine_without_a_battery_begins_no_month_anew_at_each_start(booted: date) -> None:
    month = Month("2026-11-05", 10, 20)
    for said_s in (0.0, SURE_S, 30 * SURE_S):
        month = month.add(1, 0, booted, said_s).add(1, 0, date(2026, 11, 5), said_s)
    assert month == Month("2026-11-05", 16, 20)


def test_a_month_far_ahead_counts_once_the_clock_has_said_it_for_an_hour() -> None:
    """A node that was off for months waits for nothing; one look at a clock of 2036 ended transfers until then."""
    month, far = Month("2026-11-05", 10, 20), date(2036, 2, 5)
    assert month.add(1, 2, date(2027, 9, 5), 0.0) == Month("2027-09-05", 1, 2), "it may run for minutes a day"
    assert month.add(1, 2, far, SURE_S - 1) == Month("2026-11-05", 11, 22)
    ahead = month.add(1, 2, far, SURE_S)
    assert ahead == Month("2036-02-05", 1, 2)
    assert ahead.add(1, 2, date(2026, 12, 5), SURE_S - 1) == Month("2036-02-05", 2, 4)
    assert ahead.add(1, 2, date(2026, 12, 5), SURE_S) == Month("2026-12-05", 2, 4), "what was used stays used"


def test_it_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "month"
    assert load_month(path, date(2026, 11, 21), 1) == Month("2026-11-01", 0, 0)
    save_month(path, Month("2026-11-01", 7, 8))
    assert load_month(path, date(2026, 11, 30), 1) == Month("2026-11-01", 7, 8)
    assert load_month(path, date(2026, 12, 1), 1) == Month("2026-12-01", 0, 0)
    assert load_month(path, date(2036, 2, 7), 1) == Month("2026-11-01", 7, 8), "a clock that is not right yet"


@pytest.mark.parametrize("data", [b"", b"junk", b"x" * 1000, b"\x93\xa4soon\x01\x02"])
def test_a_damaged_file_counts_from_zero(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "month"
    path.write_bytes(data)
    assert load_month(path, date(2026, 11, 21), 1) == Month("2026-11-01", 0, 0)
    assert "damaged" in caplog.text


def test_a_full_quota_says_until_when() -> None:
    month = Month("2026-11-15", 300, 200)
    assert quota_reason(month, None) == quota_reason(month, 501) == ""
    assert "until 2026-12-15" in quota_reason(month, 500)
