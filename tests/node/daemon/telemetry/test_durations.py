"""Histograms of steps and rounds count what happened, once each."""

import msgspec
import pytest

from atoll.node.daemon.telemetry.durations import NodeDurations
from atoll.node.daemon.telemetry.machine_use import disk_of
from atoll.node.daemon.telemetry.measured import median_final, model_name
from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.durations import ROUND_BOUNDS_S, STEP_BOUNDS_S, DurationCounts
from atoll.protocols.local.time_spent import TimeSpent

BUCKETS = len(STEP_BOUNDS_S) + 1


def reading(total_ns: int, **counts: int) -> TimeSpent:
    """Steps by the place of their bucket: `b4=2` are two in the fifth."""
    return TimeSpent(
        each_step_ns=total_ns, step_counts=tuple(counts.get(f"b{place}", 0) for place in range(BUCKETS))
    )


def test_a_duration_counts_in_the_first_bucket_that_holds_it():
    seen = DurationCounts((1.0, 2.0))
    for duration_s in (0.0, 1.0, 1.5, 2.0, 2.1, 1e9):
        seen.add(duration_s)
    assert seen.counts == [2, 2, 2]
    assert seen.total_s == pytest.approx(1e9 + 6.6)
    with pytest.raises(ValueError, match="argument 2 is"):
        seen.add_counts([1], 1.0)


def test_steps_are_counted_once_over_all_processes_of_the_worker():
    found = NodeDurations(lambda: 0.0)
    for spent in (
        TimeSpent(),
        reading(5, b0=2),
        reading(5, b0=2),
        reading(9, b0=2, b3=1),
        TimeSpent(),  # a new process
        reading(4, b3=4),
    ):
        found.on_spent(spent)
    assert sum(found.steps.counts) == 7
    assert (found.steps.counts[0], found.steps.counts[3]) == (2, 5)
    assert found.steps.total_s == pytest.approx(13e-9)


def test_a_round_lasts_until_the_training_of_a_later_one_starts():
    now = [100.0]
    found = NodeDurations(lambda: now[0])
    for at, name, number in (
        (100.0, "training", 4),
        (101.0, "trained", 4),
        (102.0, "training", 4),  # its worker died
        (104.0, "training", 5),
        (164.0, "closed", 5),
        (165.0, "training", 7),
    ):
        now[0] = at
        found.on_event(name, {"round": number})
    assert sum(found.rounds.counts) == 2
    assert found.rounds.total_s == 4.0 + 61.0
    assert found.rounds.counts[ROUND_BOUNDS_S.index(5.0)] == 1
    assert found.rounds.counts[ROUND_BOUNDS_S.index(120.0)] == 1


def lease(final: int) -> Lease:
    return Lease("training", final + 1, final, b"", -1, 0.0)


def test_a_minority_of_liars_does_not_make_a_node_seem_late():
    assert median_final([]) is None
    assert median_final([lease(7)]) == 7
    assert median_final([lease(7), lease(10**6)]) == 7
    assert median_final([lease(7), lease(8), lease(10**6)]) == 8


def test_the_disk_of_a_folder_that_is_there_and_of_one_that_is_not(tmp_path):
    free, size = disk_of(tmp_path)
    assert 0 <= free < size
    assert disk_of(tmp_path / "gone") is None


def test_the_model_is_that_of_a_preset_or_has_its_size():
    spec = preset("tiny", Identity(bytes(32)).peer_id, 1)
    assert model_name(spec) == "tiny"
    other = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, layers=5))
    assert model_name(other) == f"own-{other.model.parameters}"
