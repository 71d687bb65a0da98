"""What journals say of a heal: rounds and seconds, whatever the polls of a case saw."""

import json

import pytest

from tests.chaos.heal_times import Final, Healed, healed, read_journals

BEFORE = [Final(float(at), node, at, f"{at}") for at in range(5) for node in (0, 1)]


def after(*rows):
    return [*BEFORE, *(Final(*row) for row in rows)]


@pytest.mark.parametrize(
    ("finals", "changes", "expected"),
    [
        # Both go on alike.
        (after((5.0, 0, 5, "5"), (5.5, 1, 5, "5")), [], Healed(None, 1.5, 1)),
        # Node 1 had its own rounds 5 to 9, leaves them, and is in one chain with round 5, when node 0 is at 7.
        (
            after(
                (3.5, 1, 5, "x"), (3.6, 1, 6, "x"), (3.9, 1, 9, "x"), (5.0, 0, 5, "5"), (6.0, 0, 6, "6"),
                (7.0, 0, 7, "7"), (7.5, 1, 5, "5"), (7.6, 1, 6, "6"),
            ),
            [2.0, 6.5],
            Healed(2.5, 3.5, 3),
        ),
        # One round with two states is not one chain, and neither is a round that one lacks.
        (after((5.0, 0, 5, "5"), (5.5, 1, 5, "x"), (6.0, 0, 6, "6")), [], None),
        # What was final somewhere before the heal shows nothing.
        (after((3.9, 0, 5, "5"), (5.0, 1, 5, "5")), [], None),
    ],
)  # fmt: skip
def test_rounds_and_seconds_until_all_have_one_state_of_a_new_round(finals, changes, expected):
    finals.sort()
    assert healed(finals, changes, 2, 4.0) == (expected and pytest.approx(expected))


def test_journals_are_read_in_the_order_of_time(tmp_path):
    rows = {
        "a": [{"time": 1.0, "event": "final", "round": 0, "state": "s"}, {"time": 3.0, "event": "other_chain"}],
        "b": [
            {"time": 2.0, "event": "training", "round": 1},
            {"time": 0.5, "event": "final", "round": 0, "state": "s"},
        ],
    }
    for name, events in rows.items():
        (tmp_path / name / "runs" / "r").mkdir(parents=True)
        (tmp_path / name / "runs" / "r" / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    finals, changes = read_journals([tmp_path / "a", tmp_path / "b"])
    assert finals == [Final(0.5, 1, 0, "s"), Final(1.0, 0, 0, "s")]
    assert changes == [3.0]
