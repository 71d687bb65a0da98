"""`bench convergence`: one fair comparison of outer loops, in parts that can be ended and taken up again.

All arms read the same windows in the same order from the same Θ₀, with one recipe; only the outer loop differs.
Each method's settings are tried first, with the same small budget. Each finished arm is a line of `--store`, and
is not trained again. `--report` writes the page of what is stored, whatever that is.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.worker.multi_device.group import check_device
from atoll.protocols.errors import ConfigError, Divergence
from atoll_bench.convergence.arms import SIZES, Arm, spec_of
from atoll_bench.convergence.parts import Wanted, arms, next_arm
from atoll_bench.convergence.store import FILE, Line, add_line, check_codes, line_of, read_lines, reusable
from atoll_bench.convergence.tables import rows_of
from atoll_bench.convergence.trial import Point, trained
from atoll_bench.report import Row

ROUNDS = 100
"""Rounds of 15 steps, or as many steps in longer rounds."""
SEEDS = 3
_QUICK = Wanted("micro", 30, 1, ("adamw-parallel", "sgd H=15 k=64"))
_SIZE_OF = {"cpu": "micro", "cuda": "125m"}
Say = Callable[[str], None]


async def measure(
    quick: bool,
    say: Say,
    *,
    store: str = "",
    part: str = "1/1",
    minutes: float = 0.0,
    size: str = "",
    arms: str = "",
    rounds: int = ROUNDS,
    seeds: int = SEEDS,
    device: str = "cpu",
    report: str = "",
    codes: str = "",
) -> list[Row]:
    """Train what is missing of a part, until no time is left for another arm; rows of all that is stored.

    `codes`: lines of these codes are not trained again either (`store.reusable`).
    Raises ConfigError for settings that no bench can have, DecodeError for a store that is none.
    """
    only = tuple(filter(None, arms.split(",")))
    wanted = _QUICK if quick else Wanted(size or _SIZE_OF[device], 15 * rounds, seeds, only)
    number, parts = _part_of(part)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        path = Path(store or folder) / FILE
        found = read_lines(path)
        check_device(device)
        _check(wanted)
        trusted = tuple(filter(None, codes.split(",")))
        check_codes(found, trusted)
        if not report:
            left = partial(_next, wanted, path, (number, parts), device, trusted)
            found += await _train_parts(left, path, minutes, device, say)
        rows = rows_of(wanted, found)
        if report:
            from atoll_bench.convergence.page import write_page  # matplotlib takes a second

            write_page(Path(report), wanted, found)
    return rows


def _next(wanted: Wanted, path: Path, part: tuple[int, int], device: str, codes: Sequence[str]) -> Arm | None:
    """The next arm of a part that the store does not have; other processes may have added some."""
    return next_arm(wanted, reusable(read_lines(path), device, codes), *part)


async def _train_parts(
    left: Callable[[], Arm | None], path: Path, minutes: float, device: str, say: Say
) -> list[Line]:
    """Train one arm after the other, while `left` has one; the lines that were added."""
    began, added, longest_s = time.monotonic(), list[Line](), 0.0
    while (arm := left()) is not None:
        if minutes and time.monotonic() - began + longest_s > 60 * minutes:
            say(f"{minutes:g} minutes are over; the same command goes on")
            break
        at = time.monotonic()
        line = await train(arm, device)
        longest_s = max(longest_s, time.monotonic() - at)
        add_line(path, line)
        added.append(line)
        what = f"{arm.name} seed {arm.seed} {' '.join(arm.settings)}"
        say(f"{what}: {line.val_bpb:.4f} bits/byte, {line.cpu_s:.0f} CPU s")
    return added


async def train(arm: Arm, device: str) -> Line:
    """Train one arm from its beginning to its end; an arm that diverges ends there."""
    spec = spec_of(arm)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    began, points, failed = time.process_time(), list[Point](), ""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        try:
            for point in trained(arm, data, Path(folder), device):
                points += [] if point is None else [point]
                await asyncio.sleep(0)  # the bench's deadline has its turn
        except Divergence as error:
            failed = error.line()
    cpu_s = time.process_time() - began
    return line_of(arm, points, parameters=spec.model.parameters, cpu_s=cpu_s, device=device, failed=failed)


def _part_of(text: str) -> tuple[int, int]:
    """`2/3` is the second of three parts. Raises ConfigError."""
    first, slash, second = text.partition("/")
    if not (slash and first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise ConfigError(f"--part {text}: not a part", hint="1/2 is the first of two")
    return int(first), int(second)


def _check(wanted: Wanted) -> None:
    """Raise ConfigError before anything is trained."""
    if wanted.size not in SIZES:
        raise ConfigError(f"no size {wanted.size!r}", hint=f"use one of {', '.join(SIZES)}")
    for arm in arms(wanted, {}):
        spec_of(arm)
