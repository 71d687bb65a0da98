"""Child of `bench step`: a process of its own for each measurement, so that nothing but it is in memory."""

import asyncio
import resource
import sys
import tempfile
import threading
from typing import Any

import torch
from msgspec.structs import replace

from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.capacity.free_resources import gpu_memory
from atoll.node.runs.capacity.memory_model import needs_of
from atoll.node.runs.presets import preset
from atoll.node.worker.session import Session
from atoll.p2p.system.quick_end import end_process
from atoll.protocols import codec
from atoll.protocols.errors import LocalFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.local.worker_messages import (
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    Member,
    SaveRequest,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.run_spec import DataSpec, RunSpec, Stage
from atoll_bench.child import Orders, obey
from atoll_bench.step import paces

ROUNDS = 3
GPU_THREADS = 8
"""Of the host, where folds of a large preset would take minutes with one."""
TEXT = DataSpec(source="synthetic:markov?size=1048576", tokenizer="bytes", digest=b"")
ME = Identity(bytes(range(32))).peer_id


def spec_of(name: str, batch: int, *, shared: bool) -> RunSpec:
    """The preset's run with rounds of two steps. `shared`: members train some of the experts."""
    spec = preset(name, ME, 1)
    outer = replace(spec.outer, stages=(Stage(0, 2),), overlap_steps=0, holders=int(shared))
    return replace(spec, data=TEXT, outer=outer, inner=replace(spec.inner, batch=batch), reduce=None)


async def memory(
    name: str, batch: int, config: dict[str, Any], experts: int | None = None, device: str = "cpu"
) -> dict[str, float]:
    """Peak bytes of a worker that trains, folds, changes its experts and validates; and what was said of it.

    On a GPU those of the device, and `host`: those of the process.
    """
    spec = spec_of(name, batch, shared=experts is not None)
    threads = 1 if device == "cpu" else GPU_THREADS
    # What is said counts no encoder on the device where the node may choose.
    settings = NodeConfig(device=device, threads=threads, exchange_on="host", **config)
    with tempfile.TemporaryDirectory(prefix="atoll-step-") as home:
        start = StartRequest(
            codec.encode(spec),
            ME,
            home,
            "",
            threads,
            device,
            settings.frozen,
            micro_batch=settings.micro_batch,
            recompute=settings.recompute == "on",
            exchange_on=settings.exchange_on,
        )
        saved, before = threading.Event(), _device_bytes(device)
        _work(Session(start, saved=saved.set), spec, experts, saved)
    said = needs_of(spec, settings, experts)
    if device == "cpu":
        return {"peak": _peak_bytes(), "said": said.host}
    return {"peak": _device_bytes(device) - before, "said": said.device, "host": _peak_bytes()}


def _work(session: Session, spec: RunSpec, experts: int | None, saved: threading.Event) -> None:
    """Rounds of this member alone, of which one becomes final, with a validation after the first and the last."""
    for at in range(ROUNDS):
        ours = ALL
        if experts is not None:
            count = splits(spec)
            ours = bitmap_of({(at // 2 + each) % count for each in range(experts)}, count)
        *_, trained = session.train(TrainRequest(Round(at), 0, 1, spec.steps(at), -1, ours))
        assert isinstance(trained, TrainReply)
        while session.finish_save(SaveRequest(Round(at))) is None:
            saved.wait()
            saved.clear()
        pending = trained.pending
        entry = Digest(digest(ME.encode(), pending.payload))
        member = Member(entry, ME, pending.weight, pending.payload, pending.path, pending.experts)
        session.answer(FoldRequest(Round(at), (member,)))
        if at == 0:
            session.answer(FinalizeRequest(Round(at), (member,)))
        if at in (0, ROUNDS - 1):
            session.answer(EvaluateRequest())
    session.close()


def _device_bytes(device: str) -> int:
    """Bytes of a GPU that are in use, by whatever process; of this one's tensors the most that there ever were.

    Raises LocalFault if no tool tells; 0 on a CPU.
    """
    if device == "cpu":
        return 0
    found = gpu_memory([device])
    if found is None:
        raise LocalFault("no tool tells how much memory of the GPU is in use", hint="nvidia-smi must be in PATH")
    used = found.whole - found.free
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return used
    return used - torch.cuda.memory_reserved(device) + torch.cuda.max_memory_reserved(device)


def _peak_bytes() -> int:
    units = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return units if sys.platform == "darwin" else 1024 * units


async def gradients(name: str, sequences: int, device: str = "cpu") -> dict[str, float]:
    """Relative difference of a step's gradient, by way of passing it, to that of all at once."""
    return paces.gradients(name, sequences, device)


async def seconds(name: str, sequences: int, turns: int, device: str = "cpu") -> dict[str, list[float]]:
    """Seconds of a step's gradients, by way of passing, in turns."""
    return paces.seconds(name, sequences, turns, device)


ORDERS: Orders = {"memory": memory, "gradients": gradients, "seconds": seconds}

if __name__ == "__main__":
    asyncio.run(obey(ORDERS))
    end_process()
