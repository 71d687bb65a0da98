"""`bench step`: gradients, time and memory of a step that passes in micro-batches, and with layers recomputed."""

import contextlib
from collections.abc import Callable
from typing import Any

from atoll.node.worker.multi_device.group import check_device
from atoll_bench.child import Child, started
from atoll_bench.report import Bar, Row, paired_ratio, row
from atoll_bench.step.paces import MICRO, RECOMPUTED, WHOLE

GRADIENT = Bar("<=", 1e-6)
TIME = {MICRO: Bar("<=", 1.10), RECOMPUTED: Bar("<=", 1.40)}
MOST, LEAST = Bar("<=", 1.05), Bar(">=", 0.87)
TURNS, QUICK_TURNS = 5, 1
SIZES = [("10m", 4), ("50m", 2)]
GPU_TURNS = 15
GPU_SIZES = [("10m", 4), ("50m", 2), ("125m", 2), ("350m", 2), ("1b", 2)]
LARGEST = ("350m", "1b")
CHILD = "atoll_bench.step.step_node"
ONE = {"micro_batch": 1, "recompute": "on"}
STORED = {"micro_batch": 1, "recompute": "off"}


async def measure(quick: bool, say: Callable[[str], None], device: str = "cpu") -> list[Row]:
    """Rows of gradients, time and memory. Raises ConfigError for a device that is not here, LocalFault."""
    check_device(device)
    on_gpu, names = device != "cpu", ("tiny", "moe-smoke") if quick else ("tiny", "moe-smoke", "10m")
    rows: list[Row] = []
    for name in names:
        say(f"gradients of {name}")
        rows += await _gradients(name, device)
    paced, turns = ("tiny", QUICK_TURNS) if quick else ("125m", GPU_TURNS) if on_gpu else ("10m", TURNS)
    say(f"time of {paced}")
    rows += await _times(paced, turns, device)
    for name, batch in [("tiny", 4)] if quick else GPU_SIZES if on_gpu else SIZES:
        for config in (ONE,) if name in LARGEST else (ONE, STORED):
            say(f"memory of {name}, {config}")
            rows += await _memory(name, batch, config, device)
    return rows


async def _gradients(name: str, device: str) -> list[Row]:
    """Without a bar on a GPU: products are bfloat16 there, and the order of sums changes their rounding."""
    async with _child() as child:
        found = await child.ask("gradients", name=name, sequences=5, device=device)
    head, bar = _head(name, device), GRADIENT if device == "cpu" else None
    return [
        row(f"{head}: gradient, {way}, difference to the whole", value, "of its norm", bar)
        for way, value in found.items()
    ]


async def _times(name: str, turns: int, device: str) -> list[Row]:
    async with _child() as child:
        seconds = await child.ask("seconds", deadline_s=1200.0, name=name, sequences=8, turns=turns, device=device)
    head = _head(name, device)
    return [
        row(f"{head}: time of 8 sequences, {way} / whole", paired_ratio(seconds[way], seconds[WHOLE]), "x", bar)
        for way, bar in TIME.items()
    ]


def _head(name: str, device: str) -> str:
    return name if device == "cpu" else f"GPU: {name}"


def _child() -> contextlib.AbstractAsyncContextManager[Child]:
    return started(CHILD)


async def _memory(name: str, batch: int, config: dict[str, Any], device: str) -> list[Row]:
    """Peak of a worker over what is said, with both bars."""
    async with _child() as child:
        found = await child.ask("memory", deadline_s=1200.0, name=name, batch=batch, config=config, device=device)
    ratio = found["peak"] / found["said"]
    way = "recomputed" if config["recompute"] == "on" else "stored"
    note = f"{found['peak'] / 1e9:.2f} GB measured"
    if device != "cpu":
        note += f"; the host's {found['host'] / 1e9:.2f}"
    return [
        row(
            f"{_head(name, device)}: memory, one sequence at once, {way}: measured / said",
            ratio,
            "x",
            bar,
            note=note,
        )
        for bar in (MOST, LEAST)
    ]
