"""The part of `bench experts` for a GPU: all experts need more memory than a cap allows, a share of them less.

Three processes take the same steps of a worker session on the device: a share under the cap, all experts under the
cap (they must run out of memory), and all experts without one. The cap lies between what both need by arithmetic.
"""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import TrainRequest
from atoll.protocols.run.experts import ALL
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.child import started
from atoll_bench.experts.capped import Outcome, gpu_bytes, train
from atoll_bench.experts.experts_members import MEMBERS, Members, shares_of, spec_of
from atoll_bench.experts.held import arithmetic_bytes
from atoll_bench.report import Bar, Row, row

CHILD = "atoll_bench.experts.experts_node"
FROZEN = "bfloat16"
STEPS, QUICK_STEPS = 8, 1
WIDTH, HEADS = 1024, 16
COPIES_BYTES = 4
"""Of each parameter in a step, at most: a bfloat16 copy of the weight and of its gradient."""
STEP_BYTES = 512 << 20
"""Activations of a sequence and the libraries' work space, at most."""
ORDER_S = 600.0
INSIDE = Bar(">=", 1)
NOT_ASKED = "not measured: no GPU here (--device cuda)"
NO_CUDA = "not measured: torch finds no CUDA device here"
VERDICT = "GPU: a share trains inside the cap and all experts do not"


def spec_on_gpu(steps: int) -> RunSpec:
    """A run of `moe-12m` made wider, 0.3 billion parameters: weights and moments are most of what it needs."""
    spec = spec_of("moe-12m")
    experts = spec.model.experts
    assert experts is not None
    wide = replace(experts, ffn=WIDTH)
    ffn = experts.per_token * WIDTH
    model = replace(spec.model, dim=WIDTH, heads=HEADS, kv_heads=HEADS, ffn=ffn, experts=wide)
    spec = replace(spec, model=model, outer=replace(spec.outer, stages=(Stage(0, steps),)))
    spec.check()
    return spec


def cap_bytes(model: ModelSpec, share: frozenset[int], frozen: str) -> int:
    """In the middle between what a step of the share may need at most and the training state of everything.

    Raises ConfigError where the share's is not the smaller one.
    """
    assert model.experts is not None
    low = arithmetic_bytes(model, share, frozen) + COPIES_BYTES * model.parameters + STEP_BYTES
    high = arithmetic_bytes(model, frozenset(range(model.experts.count)), frozen)
    if low >= high:
        raise ConfigError(f"no cap: a share needs up to {low:,} bytes, and all experts {high:,}")
    return (low + high) // 2


def holds(share: Outcome, everything: Outcome, steps: int, cap: int) -> bool:
    """Did the share take all steps inside the cap, and all experts run out of memory under it?"""
    inside = share.steps == steps and not share.out_of_memory and share.peak_bytes <= cap
    return inside and everything.out_of_memory and everything.steps < steps


async def gpu_rows(quick: bool, device: str) -> list[Row]:
    """The rows of a GPU; without one, and without `--device cuda`, not measured."""
    if device == "cpu":
        return unmeasured_rows(NOT_ASKED)
    total = gpu_bytes()
    if not total:
        return unmeasured_rows(NO_CUDA)
    steps = QUICK_STEPS if quick else STEPS
    spec = spec_on_gpu(steps)
    cap = cap_bytes(spec.model, shares_of(spec, MEMBERS)[0], FROZEN)
    if cap >= total:
        return unmeasured_rows(f"not measured: the GPU has {total:,} bytes, and the cap is {cap:,}")
    share, everything, free = [
        await _outcome(trained, steps, under) for trained, under in (("share", cap), ("all", cap), ("all", 0))
    ]
    return rows_of(share, everything, free, steps, cap)


def rows_of(share: Outcome, everything: Outcome, free: Outcome, steps: int, cap: int) -> list[Row]:
    """The cap, what was needed, and the verdict. `free`: all experts without a cap."""
    words = f"share {_words(share)} of {steps}, all {_words(everything)}, all without a cap {_words(free)}"
    return [
        row("GPU: cap", cap / 1e9, "GB", note=f"frozen experts as {FROZEN}"),
        row("GPU: peak of a share under the cap", share.peak_bytes / 1e9, "GB", note="torch's tensors"),
        row("GPU: peak of all experts without a cap", free.peak_bytes / 1e9, "GB", note="torch's tensors"),
        row(VERDICT, float(holds(share, everything, steps, cap)), "", INSIDE, note=words),
    ]


def unmeasured_rows(why: str) -> list[Row]:
    """The same rows without a figure."""
    nothing = Outcome(0, False, 0)
    return [replace(each, value=None, passed=None, note=why) for each in rows_of(nothing, nothing, nothing, 1, 0)]


def _words(found: Outcome) -> str:
    return f"{found.steps} steps" + (", then out of memory" if found.out_of_memory else "")


def trained_under(folder: Path, spec: RunSpec, trained: str, device: str, cap: int) -> Outcome:
    """A round of the first member, which trains its share or `all`; in a process of its own."""
    members = Members(folder, spec, MEMBERS, device, FROZEN)
    experts = ALL if trained == "all" else members.shares[0]
    return train(members.start(0), TrainRequest(Round(0), 0, MEMBERS, spec.steps(0), -1, experts), cap)


async def _outcome(trained: str, steps: int, cap: int) -> Outcome:
    order: dict[str, Any] = {"trained": trained, "steps": steps, "cap": cap}
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        async with started(CHILD) as child:
            return msgspec.convert(await child.ask("capped", ORDER_S, folder=folder, **order), Outcome)
