"""Micro-batches: the whole step's gradients whatever passes at once, and nothing lost when memory runs out."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.learning.inner.loop import Inner
from atoll.node.learning.inner.passes import is_out_of_memory
from atoll.node.learning.inner.step_share import StepShare
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.genesis import genesis
from atoll.node.runs.presets import preset
from atoll.node.worker.multi_device.replica import Replica, StepMemory
from atoll.protocols.errors import LocalFault
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec
from tests.node.learning.inner.test_inner import Toy, batch_of, bits, inner_spec, loss_of

DENSE = ModelSpec(
    dim=64, layers=3, heads=2, kv_heads=1, ffn=64, vocab=96, context=8, tied=True, rope_theta=1e4, norm_eps=1e-5
)
LOUD = ExpertsSpec(
    count=4, per_token=2, ffn=64, zero=2, computed=1.5, bias_rate=0.01, load_balance=0.5, router_z=0.25
)
MODELS = {
    "dense": DENSE,
    "untied": replace(DENSE, tied=False),
    "mixture": replace(DENSE, qk_norm=True, ffn=128, experts=LOUD),
}
ALL_EXPERTS = bitmap_of(range(4), 4)


def replica_of(name: str, memory: StepMemory) -> Replica:
    model = MODELS[name]
    spec = replace(preset("tiny", peer_id_of(bytes(range(32))), 1), model=model)
    made = Replica(spec, ALL_EXPERTS if model.experts else ALL, "cpu", (torch.float32, False), memory=memory)
    values = genesis(model, 1).items()
    write_atoms(made.module, ((name, torch.from_numpy(value).float() * 2.0**-24) for name, value in values))
    return made


def windows_of(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, DENSE.vocab, (count, DENSE.context + 1))


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm."""
    parts = [torch.stack([(found[name] - value).norm(), value.norm()]) for name, value in expected.items()]
    difference, size = torch.stack(parts).norm(dim=0).tolist()
    return difference / size


def gradients(made: Replica, window: np.ndarray) -> tuple[float, dict[str, torch.Tensor]]:
    loss = made.inner.passes.run(torch.from_numpy(window), made.inner._begin)
    return float(loss), {name: p.grad.double().clone() for name, p in made.module.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=25)
@given(sequences=st.integers(1, 7), at_once=st.integers(1, 7), recompute=st.booleans(), seed=st.integers(0, 9))
def test_gradients_of_passes_are_those_of_the_whole_step(name, sequences, at_once, recompute, seed):
    window = windows_of(sequences, seed)
    loss, whole = gradients(replica_of(name, StepMemory()), window)
    made = replica_of(name, StepMemory(at_once, recompute))
    again, found = gradients(made, window)
    assert again == pytest.approx(loss, rel=1e-6)
    assert distance(found, whole) <= 1e-6
    for parameter, expected in whole.items():
        assert torch.allclose(found[parameter], expected, rtol=1e-4, atol=1e-5 * float(expected.norm())), parameter


@pytest.mark.parametrize("recompute", [False, True])
def test_a_controller_of_experts_sees_each_row_once(recompute):
    """Passes route some tokens before the step, and again when layers are recomputed."""
    whole, parts = replica_of("mixture", StepMemory()), replica_of("mixture", StepMemory(2, recompute))
    for made in (whole, parts):
        gradients(made, windows_of(5, seed=2))  # an attempt that was given up leaves no rows
        gradients(made, windows_of(5))
    rows = [[layer.mlp.seen_S.tolist() for layer in made.module.model.layers] for made in (whole, parts)]
    assert rows[0] == rows[1]
    assert {sum(layer) for layer in rows[0]} == {5 * DENSE.context * LOUD.per_token}


def test_recomputed_layers_store_their_inputs_alone():
    def stored(recompute: bool) -> int:
        made, found = replica_of("dense", StepMemory(0, recompute)), {}
        weights = {p.untyped_storage().data_ptr() for p in made.module.parameters()}

        def keep(value: torch.Tensor) -> torch.Tensor:
            place = value.untyped_storage()
            if place.data_ptr() not in weights and value.shape != made.module.model.embed_tokens.weight.shape:
                found[place.data_ptr()] = place.nbytes()
            return value

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
            loss = made.inner.passes._loss_of(made.module, torch.from_numpy(windows_of(4)))
            return sum(found.values()) + 0 * int(loss.detach())

    tokens = 4 * DENSE.context
    # Of each layer its input; of the last norm its input, scale and output; of the loss one gradient.
    assert stored(True) <= 4 * tokens * DENSE.dim * (DENSE.layers + 4) + 4096 < stored(False) / 3


class Two(StepShare):
    """Two of a step's five sequences are here, three in another process."""

    def passes(self, here, most):
        return min(-(-3 // most), 2)


@pytest.mark.parametrize(("micro_batch", "sizes"), [(0, [2]), (1, [1, 1]), (2, [1, 1]), (3, [2])])
def test_processes_with_other_shares_of_a_step_make_as_many_passes(micro_batch, sizes):
    """Else one waits for the other: each pass of a term that depends on all tokens is an exchange."""
    passed = []

    def counted(module, window):
        passed.append(len(window))
        return loss_of(module, window)

    inner = Inner(Toy(), counted, inner_spec(), micro_batch=micro_batch, share=Two())
    inner.step(batch_of(0)[:2], 0)
    assert passed == sizes


class Memory:
    """A loss that runs out of memory where more than `holds` sequences pass at once."""

    def __init__(self, holds: int, error: BaseException) -> None:
        self.holds, self.error = holds, error
        self.passed: list[list[int]] = []

    def __call__(self, module, window):
        if len(window) > self.holds and len(self.passed) % 2:  # in its second pass: some gradients are there
            self.passed.append([])
            raise self.error
        self.passed.append(window[:, 0].tolist())
        return loss_of(module, window)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["gpu", "python", "cpu"],
)
def test_a_step_is_repeated_with_half_as_many_sequences(error):
    short, whole = Memory(1, error), Inner(Toy(), loss_of, inner_spec())
    inner = Inner(Toy(), short, inner_spec(), micro_batch=2)
    window = batch_of(0)
    assert len(window) >= 4
    assert inner.step(window, 0) == pytest.approx(whole.step(window, 0), rel=1e-6)
    assert inner.passes.micro_batch == 1
    once = [row for passed in short.passed[2:] for row in passed]
    assert once == window[:, 0].tolist(), "all of the step's sequences, in their order, after the failure"
    for parameter, expected in zip(inner.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=1e-5, atol=1e-7)
    inner.step(batch_of(1), 1)
    assert all(len(passed) <= 1 for passed in short.passed[2:]), "and so from now on"


def test_where_one_sequence_does_not_fit_layers_are_recomputed_and_then_it_is_said():
    asked: list[int] = []

    def never(module, window):
        raise torch.OutOfMemoryError("out of memory")

    def recompute() -> bool:
        asked.append(inner.passes.micro_batch)
        return len(asked) == 1

    inner = Inner(Toy(), never, inner_spec(), recompute=recompute)
    before = bits(inner.module)
    with pytest.raises(LocalFault, match="one sequence"):
        inner.step(batch_of(0), 0)
    assert asked == [1, 1]
    assert bits(inner.module) == before


def test_other_faults_are_not_repeated():
    calls: list[int] = []

    def broken(module, window):
        calls.append(1)
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        Inner(Toy(), broken, inner_spec()).step(batch_of(0), 0)
    assert calls == [1]


REAL = """
import resource, sys
import numpy as np, torch
from tests.node.learning.inner.test_passes import StepMemory, replica_of, windows_of

torch.set_num_threads(1)
made = replica_of("dense", StepMemory())
made.inner.step(windows_of(2), 0)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), used + (96 << 20)))
loss = made.inner.step(windows_of(8192), 1)
print(made.inner.passes.micro_batch, np.isfinite(loss))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_real_allocator_that_refuses_only_makes_passes_smaller():
    ran = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    count, finite = ran.stdout.split()
    assert finite == "True"
    assert 1 <= int(count) < 8192


def test_what_says_that_memory_ran_out():
    assert not is_out_of_memory(RuntimeError("no kernel image"))
    assert not is_out_of_memory(ValueError("out of memory"))
