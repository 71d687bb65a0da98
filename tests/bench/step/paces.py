"""The gradients of one step, passed whole as before, in micro-batches, and with layers recomputed."""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from atoll.node.learning.inner.passes import narrow_products
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.moe import RouterLoads
from atoll.node.runs.presets import preset
from atoll.node.worker.multi_device.replica import Replica, StepMemory
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.run_spec import RunSpec

WHOLE, MICRO, RECOMPUTED = "whole, logits whole", "one sequence at once", "one at once, recomputed"
WAYS = {WHOLE: None, MICRO: StepMemory(1, recompute=False), RECOMPUTED: StepMemory(1, recompute=True)}
"""None: the whole batch, with its logits at once, by torch's own cross-entropy."""


def gradients(name: str, sequences: int, device: str = "cpu") -> dict[str, float]:
    """Distance of each way's gradient from the first one's, over its norm: of all parameters together.

    On a GPU all multiply in bfloat16, as a worker does there.
    """
    found: dict[str, list[Tensor]] = {}
    for way, (run, module) in _ways(name, sequences, device).items():
        run()
        found[way] = [
            parameter.grad.double().cpu() for parameter in module.parameters() if parameter.grad is not None
        ]
    return {way: _distance(values, found[WHOLE]) for way, values in found.items() if way != WHOLE}


def seconds(name: str, sequences: int, turns: int, device: str = "cpu") -> dict[str, list[float]]:
    """CPU time with one thread, in turns; the first one warms up and is left out.

    On a GPU the time from an idle device until it is idle again.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ways = {way: run for way, (run, _) in _ways(name, sequences, device).items()}
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(turns + 1):
            for way, run in ways.items() if turn % 2 else reversed(ways.items()):
                found[way].append(_seconds_of(run, torch.device(device)))
        return {way: values[1:] for way, values in found.items()}
    finally:
        torch.set_num_threads(threads)


def _seconds_of(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        began = time.thread_time()
        run()
        return time.thread_time() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _distance(values: list[Tensor], whole: list[Tensor]) -> float:
    ours, theirs = (torch.cat([value.flatten() for value in given]) for given in (values, whole))
    return float((ours - theirs).norm() / theirs.norm())


def _ways(name: str, sequences: int, device: str) -> dict[str, tuple[Callable[[], object], nn.Module]]:
    spec = preset(name, peer_id_of(bytes(range(32))), 1)
    shape = (sequences, spec.model.context + 1)
    window_BT1 = torch.from_numpy(np.random.default_rng(1).integers(0, spec.model.vocab, shape))
    values = [(name, torch.from_numpy(value).float() * 2.0**-24) for name, value in genesis(spec.model, 1).items()]
    return {way: _way(spec, memory, values, window_BT1, device) for way, memory in WAYS.items()}


def _way(
    spec: RunSpec, memory: StepMemory | None, values: list[tuple[str, Tensor]], window_BT1: Tensor, device: str
) -> tuple[Callable[[], object], nn.Module]:
    count = spec.model.expert_count
    experts = bitmap_of(range(count), count) if count else ALL
    replica = Replica(spec, experts, device, (torch.float32, False), memory=memory or StepMemory())
    write_atoms(replica.module, values)
    module = replica.module

    def whole() -> None:
        module.zero_grad()
        loads = RouterLoads()
        placed_BT1 = window_BT1.to(device)
        with narrow_products(torch.device(device)):
            logits_BTV = module(placed_BT1[:, :-1], loads)
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1).float(), placed_BT1[:, 1:].flatten())
            terms = [load.term for load in loads.layers]
            whole = loss + torch.stack(terms).mean() if terms else loss
        whole.backward()  # type: ignore[no-untyped-call]

    def passes() -> None:
        replica.inner.passes.run(window_BT1, module.zero_grad)

    return (whole if memory is None else passes), module
