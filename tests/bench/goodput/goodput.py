"""`bench goodput`: tokens that get into the model while nodes are killed, over those of an undisturbed swarm.

On a machine whose cores the nodes share a dead node leaves its share to the others, and a start takes from them:
the ratios are those of this machine. What the protocol alone loses is measured on virtual time, where every node
has a machine of its own (`tests/node/virtual/test_virtual_goodput.py`).
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll_bench.goodput.storm import Outcome, Storm, play
from atoll_bench.report import Bar, Row, row

NODES, QUICK_NODES = 4, 2
MINUTES, QUICK_MINUTES = 3.0, 0.25
EVERY_S = {60.0: Bar(">=", 0.95), 15.0: Bar(">=", 0.80), 5.0: Bar(">=", 0.80)}
"""Seconds between two kills -> what must be left of the goodput."""
NONE_BROKEN = Bar("<=", 0)


async def measure(
    quick: bool, say: Callable[[str], None], *, nodes: int | None = None, minutes: float | None = None
) -> list[Row]:
    """A row for each rate of kills, and what the oracle says of all homes. Raises LocalFault."""
    count = nodes or (QUICK_NODES if quick else NODES)
    seconds = 60.0 * (minutes or (QUICK_MINUTES if quick else MINUTES))
    rates = [5.0] if quick else list(EVERY_S)
    still, *stormy = [await _play(Storm(count, seconds, every_s, seed=1), say) for every_s in (0.0, *rates)]
    rows = [row("undisturbed", still.tokens_per_s, "tokens/s", note=f"{still.rounds} rounds")]
    rows += [_row(still, outcome) for outcome in stormy]
    broken = sum(len(outcome.verdict.violations) for outcome in (still, *stormy))
    checked = sum(outcome.verdict.folds for outcome in (still, *stormy))
    return [*rows, row("violations that the oracle found", broken, "", NONE_BROKEN, note=f"{checked} folds")]


async def _play(storm: Storm, say: Callable[[str], None]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="atoll-goodput-") as folder:
        outcome = await asyncio.to_thread(play, storm, Path(folder), say)
    how = f"one kill in {storm.every_s:.0f} s" if storm.every_s else "undisturbed"
    say(f"{how}: {outcome.tokens_per_s:.0f} tokens/s, {outcome.kills} kills; {outcome.verdict.line}")
    for violation in _shown(outcome):
        say(violation)
    return outcome


def _shown(outcome: Outcome) -> Sequence[str]:
    return [str(violation) for violation in outcome.verdict.violations[:20]]


def _row(still: Outcome, outcome: Outcome) -> Row:
    every_s = outcome.storm.every_s
    note = f"{outcome.kills} kills, {outcome.rounds} rounds, all nodes back {outcome.recovered_s:.0f} s after it"
    ratio = outcome.tokens_per_s / still.tokens_per_s if still.tokens else None
    return row(f"goodput, one kill in {every_s:.0f} s", ratio, "of undisturbed", EVERY_S[every_s], note=note)
