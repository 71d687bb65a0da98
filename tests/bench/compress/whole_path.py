"""A worker's encode from the module's own memory, in turns with memcpy: CPU time of one thread, so that whoever
shares the machine counts on neither side."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace

from atoll.node.learning.compress.codecs import OnHost
from atoll.node.learning.outer.fixed import clear, padding_of
from atoll.node.runs.presets import preset
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.learner import Learner
from atoll.protocols.ids import peer_id_of
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.experts import bitmap_of

STEP = 1e-3
"""What inner steps move a weight by, about."""


def seconds(name: str, turns: int, experts: int | None = None) -> tuple[list[float], list[float]]:
    """Seconds of encoding what a member trains, and of copying as many values; the first turn warms up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="atoll-encode-") as folder:
            return _seconds(name, turns, experts, Path(folder))
    finally:
        torch.set_num_threads(threads)


def _seconds(name: str, turns: int, experts: int | None, folder: Path) -> tuple[list[float], list[float]]:
    spec = preset(name, peer_id_of(bytes(range(32))), 1)
    spec = replace(spec, outer=replace(spec.outer, holders=int(experts is not None)))
    arena = arena_of(spec.model)
    learner, feedback = Learner(spec, "cpu"), ErrorFeedback(spec, folder, OnHost())
    if experts is not None:
        learner.set_trained_experts(bitmap_of(range(experts), splits(spec)))
    view_C4096 = (torch.randn((arena.chunks, CHUNK)) * 0.02 * 2**24).to(torch.int32)
    learner.weights.start(clear(view_C4096, padding_of(arena)))
    values = learner.weights.trained().values()
    source = torch.ones(sum(value.numel() for value in values))
    target = torch.zeros_like(source)
    encodes, copies = list[float](), list[float]()

    def copy() -> float:
        return _timed(partial(target.copy_, source))

    for turn in range(turns + 1):
        for value in values:
            value.add_(torch.randn(value.shape), alpha=STEP)
        before = copy()
        encodes.append(_timed(partial(feedback.encode, turn, learner.weights)))
        copies.append((before + copy()) / 2)
    return encodes[1:], copies[1:]


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
