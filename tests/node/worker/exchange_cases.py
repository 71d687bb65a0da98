"""Whole sessions that encode on a device, beside others that encode on the host. `test_exchange.py` runs this.

Without a GPU the device is the CPU and its kernels run in Triton's interpreter (TRITON_INTERPRET=1), which must be
known before Triton is imported: that is why this has a process of its own.
"""

import logging
import shutil
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from atoll.node.checkpoint.tensorfile import read_atom, write_atom
from atoll.node.learning.compress import encoding
from atoll.node.learning.compress.gpu import encoder as gpu_encoder
from atoll.node.learning.compress.gpu.encoder import OnDevice, fault_of
from atoll.node.learning.compress.gpu.encoding import is_sound
from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.outer.fixed import clear, padding_of, to_fixed, to_float
from atoll.node.learning.reduction.reducing import ReducerErrorFeedback, hand_back
from atoll.protocols.errors import Divergence
from atoll.protocols.ids import Round, digest
from atoll.protocols.local.worker_messages import (
    Ask,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    Member,
    Pending,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.run_spec import Stage
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDS, STEPS, E = 5, 2, 4
K = 4
"""The interpreter's time is that of loops over k."""
LAYOUT = Layout("sparse2", 1, K)


def spec_of(overlap_steps: int, fragments: int = 1, experts: ExpertsSpec | None = None):
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, STEPS),), overlap_steps=overlap_steps, fragments=fragments, keep_256=200,
        holders=0 if experts is None else 1,
    )  # fmt: skip
    model, compress = (
        msgspec.structs.replace(SPEC.model, experts=experts),
        msgspec.structs.replace(SPEC.compress, k=K),
    )
    return msgspec.structs.replace(SPEC, model=model, compress=compress, outer=outer)


def ruled(name: str, **outer):
    """A run with a rule of the error feedback."""
    plain = spec_of(0)
    return msgspec.structs.replace(
        plain,
        compress=msgspec.structs.replace(plain.compress, feedback=1.0, feedback_rule=name),
        outer=msgspec.structs.replace(plain.outer, **outer),
    )


PLAIN, OVERLAPPING = spec_of(0), spec_of(1, 2)
SHARED = spec_of(1, experts=ExpertsSpec(count=E, per_token=2, ffn=64, bias_rate=0.01))
ESTIMATES = ruled("econtrol", rule="slowmo", momentum_256=192, floor_256=256)
VELOCITIES = ruled("dgc", alpha_256=64, fragments=2)
HELD = {number: bitmap_of({0} if number < 2 else {1}, E) for number in range(ROUNDS + 1)}
TRIED = cache(fault_of)
TO_AND_FRO = ("device", "host", "device", "host")


@pytest.fixture(autouse=True)
def one_trial(monkeypatch):
    """Of all sessions here: it takes the interpreter a second."""
    monkeypatch.setattr(gpu_encoder, "fault_of", TRIED)


@pytest.fixture(autouse=True)
def repeatable_steps(monkeypatch):
    """A GPU's training does not give the same bits twice: there, steps are noise that does."""
    if DEVICE == "cpu":
        return

    def step(inner: Inner, windows: np.ndarray, at: int) -> float:
        made = torch.Generator().manual_seed(at)
        for parameter in inner.module.parameters():
            noise = torch.randn(parameter.shape, generator=made) * 1e-3
            parameter.data.add_(noise.to(parameter.device))
        return 1.0

    monkeypatch.setattr(Inner, "step", step)


class Node(Home):
    """Tells everything that it sends and saves."""

    def __init__(self, path: Path, spec, exchange_on: str, peer: str = ME):
        super().__init__(path, peer, spec, DEVICE, exchange_on)
        self.told: list[tuple[str, bytes]] = []

    def tell(self, what: str, value: bytes = b""):
        """And the newest generation, byte by byte."""
        newest = sorted(path for path in (self.path / "state").iterdir() if path.name.isdigit())[-1]
        saved = digest((newest / "tensors.safetensors").read_bytes())
        self.told.append((f"{what}, generation {newest.name}", value + saved))

    def train_it(self, number: int, after: int = -1, fold: FoldRequest | None = None) -> Pending:
        """With a fold that comes when the round waits for it."""
        experts = ALL if self.spec.model.experts is None else HELD[number]
        slot, slots = (0, 1) if self.start.peer == ME else (1, 2)
        for event in self.session.train(TrainRequest(Round(number), slot, slots, STEPS, after, experts)):
            if event is None:
                self.ask(fold)
            elif isinstance(event, TrainReply):
                self.keep(number)
                self.tell(f"round {number}", event.pending.payload)
                return event.pending
        raise AssertionError

    def asked(self, ask: Ask):
        self.tell(f"{ask}"[:40], bytes(self.ask(ask).state))

    def moved(self, exchange_on: str):
        self.start = msgspec.structs.replace(self.start, exchange_on=exchange_on)
        self.restart()


def kept(pending: Pending, author: str) -> Member:
    copy = Path(pending.path).with_suffix(".copy")
    shutil.copy(pending.path, copy)
    return msgspec.structs.replace(member(pending, author), experts=pending.experts, path=str(copy))


def play(node: Node, theirs: list[Member], places: list[str]) -> list[tuple[str, bytes]]:
    """Five rounds: one is missed, one folds without us first; restarts, each at the next of the places."""
    place = iter(places)
    ours = [kept(node.train_it(0), ME)]
    node.asked(FinalizeRequest(Round(0), (ours[0], theirs[0])))
    ours.append(kept(node.train_it(1), ME))
    node.asked(FinalizeRequest(Round(1), (theirs[1],)))
    node.moved(next(place))
    ours.append(kept(node.train_it(2), ME))
    node.asked(FoldRequest(Round(2), (theirs[2],)))
    node.ask(EvaluateRequest())
    ours.append(kept(node.train_it(3), ME))
    node.moved(next(place))
    late = FoldRequest(Round(3), (ours[3], theirs[3]))
    node.asked(FoldRequest(Round(2), (ours[2], theirs[2])))
    ours.append(kept(node.train_it(4, 3 if node.spec.outer.overlap_steps else -1, late), ME))
    node.asked(late)
    for number in range(2, ROUNDS):
        node.asked(FinalizeRequest(Round(number), (ours[number], theirs[number])))
    node.moved(next(place))
    node.train_it(ROUNDS)
    return node.told


@pytest.mark.parametrize(
    ("spec", "lives"),
    [
        (PLAIN, [TO_AND_FRO]),
        (OVERLAPPING, [TO_AND_FRO, ("device",) * 4]),
        (SHARED, [TO_AND_FRO]),
        (ESTIMATES, [TO_AND_FRO]),
        (VELOCITIES, [TO_AND_FRO]),
    ],
    ids=["plain", "overlapping", "shared", "estimates", "velocities"],
)
def test_what_is_sent_and_saved_is_the_hosts_bit_by_bit(tmp_path, spec, lives, monkeypatch, caplog):
    """Moved to and fro at every restart, and on the device throughout."""
    monkeypatch.setattr(OnDevice, "slab_chunks", 8)
    other = Node(tmp_path / "other", spec, "host", OTHER)
    theirs = [kept(other.train_it(number), OTHER) for number in range(ROUNDS)]
    caplog.set_level(logging.INFO)
    caplog.clear()
    told = {}
    for first, *places in (("host",) * 4, *lives):
        node = Node(tmp_path / f"{len(told)}", spec, first)
        told[first, *places] = play(node, theirs, places)
    assert caplog.messages.count(f"contributions are encoded on {DEVICE}") == str(lives).count("device")
    expected, *others = told.values()
    assert len(expected) == len(set(expected)) == 14
    for found in others:
        assert [one[0] for one, right in zip(found, expected, strict=True) if one != right] == []


def test_weights_that_are_not_finite_are_refused_with_everything_as_it_was(tmp_path):
    node = Node(tmp_path / "a", OVERLAPPING, "device")
    node.train_it(0)
    session = node.session
    weights, sending = session._learner.weights, session._feedback
    before = sending.residual_C4096.clone(), weights.anchor_C4096.clone(), weights.sent
    next(iter(weights.trained().values())).view(-1)[7] = float("nan")
    with pytest.raises(Divergence, match="local weights"):
        sending.encode(0, weights)
    assert torch.equal(sending.residual_C4096, before[0])
    assert torch.equal(weights.anchor_C4096, before[1])
    assert weights.sent == before[2]


@pytest.mark.parametrize("value", [np.nextafter(np.float32(2.0**64), 0), 2.0**64, np.inf, np.nan, 1e-45])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_device_calls_sound_what_the_host_does(value, sign):
    rows = torch.zeros((2, 4096))
    rows[1, 4000] = float(value) * sign
    assert is_sound(rows.to(DEVICE)) == encoding.is_sound(rows)


def test_what_merges_compute_has_the_hosts_bits():
    arena, made = arena_of(SPEC.model), torch.Generator().manual_seed(3)
    theta = torch.randint(-(2**31), 2**31 - 1, (arena.chunks, 4096), generator=made, dtype=torch.int32)
    values = torch.randn((arena.chunks, 4096), generator=made) * 1e-38
    assert torch.equal(to_float(theta.to(DEVICE)).cpu(), to_float(theta))
    there = clear(values.to(DEVICE, copy=True), padding_of(arena))
    assert torch.equal(there.cpu(), clear(values.clone(), padding_of(arena)))
    for place in arena.placements:
        atom = torch.randn(place.shape, generator=made)
        write_atom(there, place, atom)
        assert torch.equal(read_atom(there, place).cpu(), atom)
    there = clear(values.to(DEVICE, copy=True), padding_of(arena))
    rest = ReducerErrorFeedback(Span(1, 3), to_fixed(values[1:3] * 1e36))
    hand_back(there, rest)
    here = clear(values.clone(), padding_of(arena))
    hand_back(here, rest)
    assert torch.equal(there.cpu(), here)


def test_a_device_with_other_bits_is_not_used(tmp_path, monkeypatch, caplog):
    right = gpu_encoder.encode_rows

    def wrong(payload, layout, at, arrays, beta):
        right(payload, layout, at, arrays, beta)
        arrays.out_N4096.view(torch.int32)[-1, 4095] ^= 1

    monkeypatch.setattr(gpu_encoder, "encode_rows", wrong)
    monkeypatch.setattr(gpu_encoder, "fault_of", fault_of)
    caplog.set_level(logging.INFO)
    node = Node(tmp_path / "a", PLAIN, "device")
    line = f"contributions are encoded on the host, not on {DEVICE}: its kernels do not give the host's bits"
    assert line in caplog.messages
    monkeypatch.undo()
    assert node.session._feedback.residual_C4096.device.type == "cpu"


@pytest.mark.parametrize(
    "fault", [RuntimeError("Failed to find C compiler.\nmore"), Divergence("no"), OSError("x")]
)
def test_kernels_that_do_not_run_are_a_line(monkeypatch, fault):
    def fails(*_):
        raise fault

    monkeypatch.setattr(gpu_encoder, "encode_rows", fails)
    said = fault_of(torch.device(DEVICE), LAYOUT, 0.95)
    assert said == f"its kernels do not run: {type(fault).__name__}: {str(fault).splitlines()[0]}"


@pytest.mark.parametrize(("codec", "k"), [("sparse1", 64), ("int8", 4096), ("sparse2", 600)])
def test_what_has_no_kernels_is_encoded_on_the_host(codec, k):
    assert fault_of(torch.device(DEVICE), Layout(codec, 1, k), 0.95).startswith("there are no kernels")
