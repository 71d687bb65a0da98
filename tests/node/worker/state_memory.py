"""Memory and writes of a worker, by array: `python state_memory.py PRESET EXPERTS OVERLAP ROUNDS`; prints JSON.

EXPERTS: how many of each layer are trained; 0: all of a dense preset. With `--slices N` the feed-forwards of a
dense preset are cut into N, and EXPERTS of these are trained. RssAnon is memory that only swapping frees; pages
of mapped files are not in it. `arrays` are resident anonymous bytes of each array, by
/proc/self/pagemap, whose page numbers only root sees.
"""

import argparse
import ctypes
import gc
import json
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.runs.presets import preset
from atoll.node.worker.schedule.precompile import warm
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.ids import PeerId, Round, digest, peer_id_of
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.worker_messages import (
    FinalizeRequest,
    FoldRequest,
    Member,
    SaveRequest,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.experts import bitmap_of
from atoll.protocols.run.run_spec import RunSpec, Stage
from tests.waiting import poll

ME = peer_id_of(bytes(32))
STEPS = 2
_PAGE = 4096
_PRESENT, _FILE, _NUMBER = np.uint64(1 << 63), np.uint64(1 << 61), np.uint64((1 << 55) - 1)


def status_bytes(field: str) -> int:
    """A field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


def settled_anon_bytes() -> int:
    """RssAnon when nothing is freed and not returned."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("RssAnon")


def written_bytes() -> tuple[int, int]:
    """Bytes of pages that this process made dirty, and of those that were deleted before they were written."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["write_bytes"]), int(lines["cancelled_write_bytes"])


def anonymous_bytes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Resident anonymous bytes under each of these tensors; one that shares another's memory has its own too."""
    found = {}
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        for name, tensor in tensors.items():
            first = tensor.data_ptr() // _PAGE
            last = -(-(tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE)
            file.seek(8 * first)
            words = np.frombuffer(file.read(8 * (last - first)), np.uint64)
            own = words[((words & _PRESENT) != 0) & ((words & _FILE) == 0)] & _NUMBER
            # Pages that were only read are all the same one, of zeros; RssAnon does not count them.
            found[name] = len(np.unique(own)) * _PAGE
    return found


def arrays_of(session: Session) -> dict[str, int]:
    """Resident anonymous bytes of a session's arrays, summed by kind."""
    learner, fold = session._learner, session._fold
    module = learner.module
    groups: dict[str, dict[str, Tensor]] = {
        "final": {"final": fold.final_state_S4096},
        "view": {} if fold._view is fold._final else {"view": fold._view.values_S4096},
        "anchor": {"anchor": learner.weights.anchor_C4096},
        "residual": {"residual": session._feedback.residual_C4096},
        "local": dict(module.named_parameters()),
        "gradients": {name: p.grad for name, p in module.named_parameters() if p.grad is not None},
        "moments": {n: t for n, t in learner.inner.state().items() if not n.startswith("step/")},
        "frozen": dict(module.named_buffers()),
    }
    return {kind: sum(anonymous_bytes(tensors).values()) for kind, tensors in groups.items()}


class Peak:
    """The highest RssAnon while it runs, looked at every 2 ms."""

    def __enter__(self) -> "Peak":
        self.most = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.002):
            self.most = max(self.most, status_bytes("RssAnon"))

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def run_of(name: str, experts: int, overlap: int, slices: int = 0, batch: int = 4) -> RunSpec:
    """A preset with rounds of two steps of so many sequences."""
    spec = preset(name, ME, 1)
    if slices:
        model = msgspec.structs.replace(spec.model, ffn_slices=slices)
        spec = msgspec.structs.replace(spec, model=model, reduce=None)
    outer = msgspec.structs.replace(
        spec.outer, stages=(Stage(0, STEPS),), holders=int(experts > 0), overlap_steps=overlap
    )
    inner = msgspec.structs.replace(spec.inner, batch=batch)
    data = msgspec.structs.replace(spec.data, source="synthetic:markov?size=65536", tokenizer="bytes", digest=b"")
    return msgspec.structs.replace(spec, outer=outer, inner=inner, data=data)


def rounds(session: Session, spec: RunSpec, experts: bytes, count: int) -> Iterator[int]:
    """Train so many rounds, each final at once."""
    for number in range(count):
        ask = TrainRequest(Round(number), 0, 1, STEPS, -1, ahead=spec.outer.overlap_steps, experts=experts)
        *_, trained = session.train(ask)
        assert isinstance(trained, TrainReply)
        poll("the round is safe", lambda at=number: session.finish_save(SaveRequest(Round(at))))
        mine = trained.pending
        peer = PeerId(ME)
        named = Member(digest(mine.payload), peer, mine.weight, mine.payload, mine.path, experts=mine.experts)
        session.answer(FoldRequest(Round(number), (named,)))
        session.answer(FinalizeRequest(Round(number), (named,)))
        yield number


def main(
    name: str, experts: int, overlap: int, count: int, *, slices: int, batch: int, frozen: str
) -> dict[str, object]:
    spec = run_of(name, experts, overlap, slices, batch)
    trained = bitmap_of(range(experts), splits(spec)) if experts else b""
    warm(codec_of(spec.compress.codec, spec.compress.k))
    base = settled_anon_bytes()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        start = StartRequest(
            codec.encode(spec), ME, folder, "", 1, "cpu", frozen=frozen, micro_batch=1, recompute=True
        )
        with Peak() as peak:
            session = Session(start, saves=TimeBudget(1e-9))
            writes = [written_bytes() for _ in rounds(session, spec, trained, count)]
        kept = settled_anon_bytes()
        held = sum(value.numel() for value in session._learner.module.parameters())
        each = {
            kind: (writes[-1][at] - writes[0][at]) / (count - 1) / held
            for at, kind in enumerate(("written", "cancelled"))
        }
        return {
            "preset": name, "experts": experts, "slices": slices, "frozen": frozen,
            "parameters": spec.model.parameters, "trained": held,
            "base_mib": base >> 20, "kept_mib": (kept - base) >> 20, "peak_mib": (peak.most - base) >> 20,
            "arrays_mib": {kind: round(size / 2**20, 1) for kind, size in arrays_of(session).items()},
            "bytes_a_round_and_trained_parameter": {kind: round(size, 1) for kind, size in each.items()},
            "state": session.started().state.hex()[:16],
        }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="PRESET")
    for number in ("experts", "overlap", "count"):
        parser.add_argument(number, type=int)
    parser.add_argument("--slices", type=int, default=0, help="FFN slices of a dense preset")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step, which pass one at a time")
    parser.add_argument("--frozen", default="float32", help="how those are stored that are not trained")
    print(json.dumps(main(**vars(parser.parse_args())), indent=1))
