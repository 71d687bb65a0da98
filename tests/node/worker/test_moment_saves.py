"""Moments are saved with every eighth trained round and with a stop: what that writes, and what a kill costs."""

from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.worker.schedule.moment_saves import ROUNDS, MomentSaves
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.local.worker_messages import StartRequest
from tests.node.worker.session_home import OVERLAPPING, SPEC, Home
from tests.node.worker.state_memory import ME, rounds, run_of


def test_they_are_due_with_every_eighth_round_and_when_more_than_steps_changed_them():
    saves = MomentSaves()
    assert not saves.are_old, "those on the disk are an earlier process's, as are those in memory"
    written = []
    for number in range(2 * ROUNDS + 1):
        saves.trained_round()
        written += [number] if saves.begin("a") else []
        saves.end()
        assert saves.are_old == (number % ROUNDS > 0)
    assert written == [0, ROUNDS, 2 * ROUNDS]
    assert saves.begin("b")


def test_a_save_that_failed_is_due_again():
    saves = MomentSaves()
    saves.trained_round()
    assert saves.begin("a")
    saves.end()
    saves.trained_round()
    assert saves.begin("b")  # the disk refuses it
    assert saves.begin("b")
    saves.end()
    saves.trained_round()
    assert saves.begin("b", forced=True)  # refused too
    assert not saves.begin("b")
    saves.end()
    assert saves.are_old


def written_bytes(state: Path, seen: set[tuple[int, int]]) -> int:
    """What the newest generation added to the disk: files that no earlier one had, and the states of the fold."""
    total = 0
    for path in max(state.glob("*[0-9]")).rglob("*"):
        status = path.stat()
        key = status.st_ino, status.st_mtime_ns
        if path.is_file() and (path.suffix == ".array" or key not in seen):
            total += status.st_blocks * 512
        seen.add(key)
    return total


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_trained_round_writes_ten_bytes_of_a_parameter(tmp_path, overlap):
    """Θ_final and error feedback 4 each, moments 8 with every eighth round; local weights that are sent none."""
    plain = run_of("tiny", 0, overlap)
    spec = msgspec.structs.replace(plain, inner=msgspec.structs.replace(plain.inner, optimizer="adamw"))
    start = StartRequest(codec.encode(spec), ME, str(tmp_path), "", 1, "cpu")
    session = Session(start, saves=TimeBudget(1e-9))
    seen = set[tuple[int, int]]()
    each = [written_bytes(tmp_path / "state", seen) for _ in rounds(session, spec, b"", 2 * ROUNDS + 1)]
    session.close()
    parameters = spec.model.parameters
    assert 8 * parameters < sum(each[1:]) / (2 * ROUNDS) <= 10 * parameters


def steps_on_disk(node: Home) -> set[float]:
    return {float(value) for name, value in node.saved().tensors.items() if name.startswith("step/")}


@pytest.mark.parametrize("spec", [SPEC, OVERLAPPING], ids=["", "overlap"])
def test_a_kill_sets_the_moments_back_and_nothing_else(tmp_path, spec):
    node = Home(tmp_path, ME, spec)
    for number in range(3):
        node.train(number)
    before = node.session._feedback.residual_C4096.clone()
    assert len(node.restart().pending) == 3
    assert torch.equal(node.session._feedback.residual_C4096, before)
    assert node.session._rounds.steps_taken == 6
    assert steps_on_disk(node) == {2.0}
    first = node.session._learner.inner.state()
    assert all(torch.equal(value, node.saved().tensors[name]) for name, value in first.items())


def test_a_stop_saves_them_and_in_the_middle_of_a_round_nothing_else(tmp_path):
    node = Home(tmp_path, ME, SPEC)
    for number in range(3):
        node.train(number)
    residual = node.residual()
    next(node.events(3))
    node.session.close()
    assert steps_on_disk(node) == {7.0}
    assert (node.restart().pending[-1].round, node.session._rounds.steps_taken) == (2, 6)
    assert torch.equal(node.residual(), residual)
    for number in (3, 4):
        node.train(number)
    node.session.close()
    assert steps_on_disk(node) == {11.0}


def test_moments_that_came_from_a_peer_are_saved_with_the_next_round(tmp_path):
    node = Home(tmp_path, ME, SPEC)
    node.train(0)
    inner = node.session._learner.inner
    inner.continue_from({name: value.clone() for name, value in inner.state().items()})
    node.train(1)
    assert steps_on_disk(node) == {6.0}
