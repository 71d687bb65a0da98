"""`bench step`: gradients, time and memory of a step that passes in micro-batches, and with layers recomputed."""

import contextlib
from collections.abc import Callable
from typing import Any

from atoll_bench.child import Child, started
from atoll_bench.report import Bar, Row, paired_ratio, row
from atoll_bench.step.paces import MICRO, RECOMPUTED, WHOLE

GRADIENT = Bar("<=", 1e-6)
TIME = {MICRO: Bar("<=", 1.10), RECOMPUTED: Bar("<=", 1.40)}
MOST, LEAST = Bar("<=", 1.05), Bar(">=", 0.87)
TURNS, QUICK_TURNS = 5, 1
GPU_TURNS = 15
GPU_SIZES = [("10m", 4), ("50m", 2), ("125m", 2), ("350m", 2), ("1b", 2)]
LARGEST = ("350m", "1b")
CHILD = "atoll_bench.step.step_node"
ONE = {"micro_batch": 1, "recompute": "on"}
STORED = {"micro_batch": 1, "recompute": "off"}


async def measure(quick: bool, say: Callable[[str], None], device: str = "cpu") -> list[Row]:
    """Rows of gradients, time and memory. Raises LocalFault."""
    if device != "cpu":
        return await on_gpu(quick, say, device)
    paced, turns = ("tiny", QUICK_TURNS) if quick else ("10m", TURNS)
    sizes = [("tiny", 4)] if quick else [("10m", 4), ("50m", 2)]
    rows: list[Row] = []
    for name in ("tiny", "moe-smoke") if quick else ("tiny", "moe-smoke", "10m"):
        say(f"gradients of {name}")
        async with _child() as child:
            found = await child.ask("gradients", name=name, sequences=5)
        rows += [
            row(f"{name}: gradient, {way}, difference to the whole", value, "of its norm", GRADIENT)
            for way, value in found.items()
        ]
    say(f"time of {paced}")
    async with _child() as child:
        seconds = await child.ask("seconds", deadline_s=1200.0, name=paced, sequences=8, turns=turns)
    rows += [
        row(f"{paced}: time of 8 sequences, {way} / whole", paired_ratio(seconds[way], seconds[WHOLE]), "x", bar)
        for way, bar in TIME.items()
    ]
    for name, batch in sizes:
        for config in (ONE, STORED):
            say(f"memory of {name}, {config}")
            rows += await _memory(name, batch, config)
    return rows


async def on_gpu(quick: bool, say: Callable[[str], None], device: str) -> list[Row]:
    """The same of a GPU, where products are bfloat16: how far gradients differ by their order has no bar there."""
    rows: list[Row] = []
    for name in ("tiny", "moe-smoke") if quick else ("tiny", "moe-smoke", "10m"):
        say(f"gradients of {name}")
        async with _child() as child:
            found = await child.ask("gradients", name=name, sequences=5, device=device)
        rows += [
            row(f"GPU: {name}: gradient, {way}, difference to the whole", value, "of its norm")
            for way, value in found.items()
        ]
    paced, turns = ("tiny", QUICK_TURNS) if quick else ("125m", GPU_TURNS)
    say(f"time of {paced}")
    async with _child() as child:
        seconds = await child.ask("seconds", name=paced, sequences=8, turns=turns, device=device)
    for way, bar in TIME.items():
        ratio = paired_ratio(seconds[way], seconds[WHOLE])
        note = f"{1000 * min(seconds[way]):.0f} ms of {1000 * min(seconds[WHOLE]):.0f}"
        rows.append(row(f"GPU: {paced}: time of 8 sequences, {way} / whole", ratio, "x", bar, note=note))
    for name, batch in [("tiny", 4)] if quick else GPU_SIZES:
        for config in (ONE,) if quick or name in LARGEST else (ONE, STORED):
            say(f"memory of {name}, {config}")
            rows += await _memory(name, batch, {**config, "exchange_on": "host"}, device)
    return rows


def _child() -> contextlib.AbstractAsyncContextManager[Child]:
    return started(CHILD)


async def _memory(name: str, batch: int, config: dict[str, Any], device: str = "cpu") -> list[Row]:
    """Peak of a worker over what is said, with both bars."""
    async with _child() as child:
        found = await child.ask("memory", deadline_s=1200.0, name=name, batch=batch, config=config, device=device)
    ratio = found["peak"] / found["said"]
    way = "recomputed" if config["recompute"] == "on" else "stored"
    note = f"{found['peak'] / 1e9:.2f} GB measured"
    if device != "cpu":
        name, note = f"GPU: {name}", f"{note}; the host's {found['host'] / 1e9:.2f}"
    return [
        row(f"{name}: memory, one sequence at once, {way}: measured / said", ratio, "x", bar, note=note)
        for bar in (MOST, LEAST)
    ]
