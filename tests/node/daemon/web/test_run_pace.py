"""Time left and alarms: from what the node measured, and null where that says nothing."""

import msgspec
import pytest

from atoll.node.daemon.web.run_pace import alarms_of, pace_of, seconds_of
from tests.node.daemon.web.fed_node import ROUND_ROW, new_status

ROUND_S = seconds_of(ROUND_ROW)
ROWS = [msgspec.structs.replace(ROUND_ROW, round=number) for number in range(7)]


def now(**changes):
    return msgspec.structs.replace(new_status(), **changes)


def test_seconds_of_a_round_are_all_its_shares():
    assert pytest.approx(0.05 + 1.5 + 0.25 + 0.2) == ROUND_S


def test_time_left_is_that_of_the_rounds_to_come_at_the_median_of_the_newest():
    slow = msgspec.structs.replace(ROWS[3], steps_s=1000.0)
    at_hand = msgspec.structs.replace(
        ROUND_ROW, round=7, payload_bytes=0, wait_s=0.25, steps_s=0.0, transfer_s=0.0
    )
    pace = pace_of(now(round=7, rounds=54), [*ROWS[:3], slow, *ROWS[4:], at_hand], 0.0)
    assert pace.round_s == pytest.approx(ROUND_S)
    assert pace.left_s == pytest.approx(47 * ROUND_S - seconds_of(at_hand))


@pytest.mark.parametrize("activity", ["paused", "syncing", "observing", "gathering"])
def test_no_time_left_while_the_node_does_not_train(activity):
    assert pace_of(now(activity=activity), ROWS, 0.0).left_s is None


def test_no_pace_from_one_round_or_from_rounds_of_others():
    assert pace_of(now(), ROWS[:1], 0.0).round_s is None
    others = [msgspec.structs.replace(row, payload_bytes=0) for row in ROWS]
    assert pace_of(now(), others, 0.0).left_s is None


def test_a_run_that_is_over_has_no_time_left():
    assert pace_of(now(activity="finished", round=53), ROWS, 0.0).left_s == 0.0


def words(status) -> list[tuple[str, str]]:
    return [(alarm.level, alarm.word) for alarm in alarms_of(status)]


def test_alarms():
    assert words(now()) == []
    assert words(now(trouble="the disk is full")) == [("bad", "trouble")]
    assert words(now(members=1, peers=0, trouble="x")) == [("bad", "trouble"), ("warn", "alone")]
    assert words(now(members=1, activity="finished")) == []
    assert words(now(members=0, activity="syncing")) == [], "it has heard nobody yet"


@pytest.mark.parametrize(("peers", "text"), [(0, "0 peers"), (1, "1 peer"), (2, "2 peers")])
def test_who_is_alone_is_told_its_connections(peers, text):
    (alarm,) = alarms_of(now(members=1, peers=peers))
    assert alarm.text.endswith(f"connected to {text}")
