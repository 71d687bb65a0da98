"""Times of the codec, of the published pipeline and of memcpy, in turns in one process; `atoll bench compress`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.encoding import encode_residual
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.kernels.compiled import fresh_like
from atoll.node.learning.outer.aggregation import Aggregation
from atoll.node.learning.outer.rules.choice import KERNELS
from atoll.node.learning.outer.rules.landing import Landing, landing_of
from atoll.node.learning.outer.rules.momentum import MomentumRule
from atoll.protocols.run.arena import CHUNK, Span
from atoll.protocols.run.payload import Layout
from atoll_bench.compress import published
from atoll_bench.compress.roofline import Limits

K, BETA, PEERS = 64, 0.95, 8
NESTEROV = MomentumRule(KERNELS["nesterov"], 179, 230)
CO2 = MomentumRule(KERNELS["co2"], 256, 128, momenta=2, more=(256, 1 << 24))
TENSOR_CHUNKS = 1024
"""The published pipeline works tensor by tensor: matrices of 2048 × 2048."""


@dataclass
class Paces:
    """What was measured; lists have one entry per turn."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    ours_bytes: int = 0
    published_bytes: int = 0
    extra_bytes: int | None = None
    """Peak of resident memory while encoding, over what was there before, at least the payload (it may lie where
    something was freed); None where the system does not tell."""
    first_call_s: float = 0.0
    differs: list[str] = field(default_factory=list)
    """On a GPU: what is not the CPU's, bit for bit."""
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Relative squared error of the sent values by distribution: ours, published."""

    def take(self, name: str, work: Callable[[], object]) -> None:
        """Measure once."""
        began = time.perf_counter()
        work()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)


class Work:
    """Arrays of one model of `chunks` chunks on a device, as after some inner steps, and payloads of 8 peers."""

    def __init__(self, chunks: int, device: str = "cpu") -> None:
        self.chunks = chunks
        self.base = _owned((_noise(chunks, 1, device).mul_(0.02 * 2**24)).to(torch.int32))
        self.base_float = self.base.to(torch.float32).mul_(2.0**-24)
        self.local = self.base_float + _noise(chunks, 2, device).mul_(1e-3)
        self.residual = _noise(chunks, 3, device).mul_(1e-3)
        self.rival = self.residual.clone()
        self.target = torch.zeros_like(self.base_float)
        self.view = torch.zeros_like(self.base)
        self.state = _owned(torch.cat([self.base, self.view]))
        self.next_state = _owned(torch.zeros_like(self.state))
        self.two = _owned(torch.cat([self.base, self.view, self.view]))
        self.next_two = _owned(torch.zeros_like(self.two))
        self.payloads: list[bytes] = []
        self.sent: list[list[published.Sent]] = []
        self.limits: dict[str, Callable[[], object]] = {}
        """What bounds folds on this machine, measured beside them."""

    def encode(self) -> bytes:
        """Ours."""
        layout = Layout("sparse2", self.chunks, K)
        return encode_residual(self.residual, self.base_float, self.local, BETA, layout)

    def encode_published(self) -> list[published.Sent]:
        """Theirs, tensor by tensor."""
        return [
            published.encode(self.rival[rows], self.base_float[rows], self.local[rows], BETA, K)
            for rows in self._tensors()
        ]

    def fold(self) -> None:
        """Ours: payloads -> θ + U; every rule of the wire and the range of every weight is checked."""
        weights = [64] * len(self.payloads)
        self.view = codec_of("sparse2", K).apply_update(self.base, weights, self.payloads, OuterStep(256, 64))

    def fold_with_momentum(self) -> None:
        """Ours with DiLoCo's outer step (docs/outer-loop.md); its momentum is zero, which costs the same."""
        self.next_state = self._landed(self.state, NESTEROV)

    def fold_with_co2(self) -> None:
        """Ours with CO2's outer step, which has two arrays beside Θ; both are zero, which costs the same."""
        self.next_two = self._landed(self.two, CO2)

    def _landed(self, state: Tensor, rule: MomentumRule) -> Tensor:
        weights, landing = [64] * len(self.payloads), self._landing(rule)
        return codec_of("sparse2", K).apply_update(
            state, weights, self.payloads, OuterStep(256, 64), landing=landing, fresh=self._again
        )

    def _landing(self, rule: MomentumRule) -> Landing:
        return landing_of(rule, (Span(0, self.chunks),), self.chunks)

    def find_limits(self) -> None:
        """Measure what bounds folds of the payloads too."""
        landings = {"fold with momentum": self._landing(NESTEROV), "fold with co2": self._landing(CO2)}
        layout = Layout("sparse2", self.chunks, K)
        self.limits = Limits(self.payloads, layout, landings, self.two, self.next_two).ways()

    def _again(self, like: Tensor) -> Tensor:
        """An array of this size that was there before, as a run's fold has one: all its states are of one size."""
        for kept in (self.next_state, self.next_two):
            if kept.shape == like.shape:
                return kept
        raise AssertionError(like.shape)

    def fold_with_edit(self) -> None:
        """Ours with EDiT's weights and its clip of the mean, in atoms of 16 chunks (docs/aggregation.md)."""
        weights, atom_C = [64] * len(self.payloads), (np.arange(self.chunks) // 16).astype(np.int32)
        judge = Aggregation(None, 64, atom_C, [1 << 200] * (int(atom_C[-1]) + 1), 0, step_most_256=2560)
        codec = codec_of("sparse2", K)
        moved = codec.apply_update(self.base, weights, self.payloads, OuterStep(256, 64), judge=judge)
        judge.shorten(moved, self.base, 256)

    def fold_published(self) -> None:
        """Theirs: payloads -> θ, checked as they do."""
        for at, rows in enumerate(self._tensors()):
            published.fold_into(self.target[rows], [peer[at] for peer in self.sent], 1.0, K)

    def ways(self) -> dict[str, Callable[[], object]]:
        """What is measured beside memcpy."""
        return {
            "encode": self.encode,
            "encode published": self.encode_published,
            "fold": self.fold,
            "fold with momentum": self.fold_with_momentum,
            "fold with co2": self.fold_with_co2,
            "fold with edit": self.fold_with_edit,
            "fold published": self.fold_published,
            **self.limits,
        }

    def copy(self) -> None:
        """memcpy of the same float32 array, both sides in memory already."""
        self.target.copy_(self.local)

    def _tensors(self) -> list[slice]:
        return [slice(start, start + TENSOR_CHUNKS) for start in range(0, self.chunks, TENSOR_CHUNKS)]


def measure(chunks: int, turns: int, say: Callable[[str], None]) -> Paces:
    """Everything, with one thread. The order of the ways changes from turn to turn; the first turn warms up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(chunks, turns, say)
    finally:
        torch.set_num_threads(threads)


def _measure(chunks: int, turns: int, say: Callable[[str], None]) -> Paces:
    paces = Paces()
    paces.take("first", Work(1).encode)
    paces.first_call_s = paces.seconds.pop("first")[0]
    paces.errors = {kind: errors_of(kind) for kind in DISTRIBUTIONS}
    work = Work(chunks)
    for _ in range(PEERS):
        work.payloads.append(work.encode())
        work.sent.append(work.encode_published())
    paces.ours_bytes = len(work.payloads[0])
    paces.published_bytes = sum(sent.size_bytes for sent in work.sent[0])
    work.find_limits()
    found = peak_bytes(work.encode)
    paces.extra_bytes = None if found is None else max(found, paces.ours_bytes)
    take_turns(paces, work, turns, say)
    return paces


def take_turns(
    paces: Paces, work: Work, turns: int, say: Callable[[str], None], settle: Callable[[], None] = lambda: None
) -> None:
    """Each way beside a memcpy, in changing order; the first turn warms up. `settle` waits for what was begun."""
    ways = work.ways()

    def settled(way: Callable[[], object]) -> None:
        way()
        settle()

    for turn in range(turns + 1):
        names = list(ways)
        for at in range(len(names)):
            name = names[(at + turn) % len(names)]
            paces.take(f"{name}: memcpy", partial(settled, work.copy))
            paces.take(name, partial(settled, ways[name]))
        say(f"turn {turn} of {turns} done")
    paces.seconds = {name: taken[1:] for name, taken in paces.seconds.items()}


def peak_bytes(work: Callable[[], object]) -> int | None:
    """Most resident memory while `work` runs, over the memory before it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        work()
        return _status_bytes("VmHWM") - before
    except (OSError, LookupError):
        return None


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


DISTRIBUTIONS = ("Gaussian", "Laplace", "scale differs between chunks")


def errors_of(kind: str) -> tuple[float, float]:
    """Relative squared error of the values that are sent of 256 chunks: ours, published."""
    values = _noise(256, 5)
    if kind == "Laplace":
        uniform = torch.rand((256, CHUNK), generator=torch.Generator().manual_seed(6)).clamp(1e-7)
        values = values.sign() * -uniform.log()
    if kind == "scale differs between chunks":
        values *= torch.randn((256, 1), generator=torch.Generator().manual_seed(7)).exp()
    values *= 1e-3
    return sent_errors(values, [slice(0, 256)], K)


def sent_errors(values_C4096: Tensor, tensors: Sequence[slice], k: int) -> tuple[float, float]:
    """Relative squared error of the values that are sent: ours, and the published quantiser's, tensor by tensor.

    Both are given the same values: those that our encoder chose, of all chunks that say something.
    """
    nothing, left = torch.zeros_like(values_C4096), values_C4096.clone()
    encode_residual(left, nothing, nothing, 1.0, Layout("sparse2", len(left), k))
    sent = left != values_C4096
    theirs = 0.0
    for rows in tensors:
        chosen = values_C4096[rows][sent[rows]]
        if len(chosen) > 1:
            code, lookup = published.quantise(chosen)
            theirs += float(((lookup[code.long()] - chosen) ** 2).sum())
    whole = float((values_C4096[sent] ** 2).sum())
    return float((left[sent] ** 2).sum()) / whole, theirs / whole


def _owned(state: Tensor) -> Tensor:
    """In such memory as a run's fold has its states."""
    return state if state.device.type != "cpu" else fresh_like(state).copy_(state)


def _noise(chunks: int, seed: int, device: str = "cpu") -> Tensor:
    made = torch.Generator(device).manual_seed(seed)
    return torch.randn((chunks, CHUNK), generator=made, device=device)
