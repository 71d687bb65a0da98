"""The next step's batch is loaded beside a step, and is the one that the step would have loaded itself."""

import threading
from pathlib import Path

import numpy as np
import pytest

from atoll.node.learning.data.prefetch import NextBatch
from tests.node.worker.session_home import Home
from tests.waiting import HANGS_S


def test_a_batch_that_was_begun_is_loaded_once_and_by_another_thread():
    batches, loaded = NextBatch(), []

    def load():
        loaded.append(threading.current_thread())
        return np.zeros((1, 2), np.int64)

    batches.begin(1, load)
    assert batches.get(1, load).shape == (1, 2)
    assert len(loaded) == 1
    assert loaded[0] is not threading.current_thread()
    batches.get(1, load)
    assert loaded[1] is threading.current_thread(), "it was handed out"


def test_another_batch_than_was_begun_is_loaded_now():
    batches = NextBatch()
    batches.begin(1, lambda: np.full((1, 2), 1))
    assert batches.get(2, lambda: np.full((1, 2), 2))[0, 0] == 2


def test_what_the_disk_refused_is_said_where_the_batch_is_needed():
    def broken():
        raise OSError("gone")

    batches = NextBatch()
    batches.begin(1, broken)
    with pytest.raises(OSError, match="gone"):
        batches.get(1, lambda: np.zeros((1, 2), np.int64))


def test_a_round_loads_the_batch_of_a_step_during_the_step_before(tmp_path: Path):
    """And the payload is that of a round without it."""
    node, twin = Home(tmp_path / "a"), Home(tmp_path / "b")
    trainer, begun = node.session._rounds, threading.Event()
    begin, step = trainer.batches.begin, trainer.learner.step
    where = []

    def watched(key, load):
        def loading():
            where.append((key, threading.current_thread()))
            begun.set()
            return load()

        begin(key, loading)

    def step_when_loaded(*args):
        if not where:
            assert begun.wait(HANGS_S), "nothing is loaded while a step runs"
        return step(*args)

    trainer.batches.begin, trainer.learner.step = watched, step_when_loaded
    twin.session._rounds.batches.begin = lambda *_: None
    assert node.train(0).pending.payload == twin.train(0).pending.payload
    assert [key[1:] for key, _ in where] == [(2, 2)], "of two steps of two sequences, the second"
    assert where[0][1] is not threading.current_thread()
