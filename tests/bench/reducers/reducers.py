"""`bench reducers`: in how many rounds a reducer counts that lies, or does not open what it lied about.

Shipped rates and rules; small and large arenas. Of the network, the worker and the vote there are stand-ins
(council.py); tests/node/virtual/test_virtual_reducers.py has whole nodes.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

from atoll.protocols.run.slices import ReduceSpec
from atoll_bench.reducers.council import Council, Lie, rounds_counted, shipped
from atoll_bench.reducers.gang import Gang
from atoll_bench.report import Bar, Row, row

MEMBERS = 18
ROUNDS = 40
MOST_ROUNDS = 20
ARENAS = {12: 40, 12_000: 20}
"""Chunks, and how many seeds."""
LIES = {
    "lies about one chunk": Lie(chunks=1, is_mute=False),
    "lies about its slice": Lie(chunks=None, is_mute=False),
    "opens all but one chunk": Lie(chunks=1, is_mute=True),
    "opens nothing of its slice": Lie(chunks=None, is_mute=True),
}
HONEST = Lie(chunks=0, is_mute=False)
ABSENT = Lie(chunks=0, is_mute=False, asleep=range(8, 9))
"""Honest; its worker is dead when the Reduction of one round is to be opened."""
EXCLUDED = Bar(">=", 95.0)
NEVER = Bar("<=", 0.0)
ONE_MISS = Bar("<=", 5.0)
"""Its round, and the `gap` rounds for which a miss passes it over."""
SIXTH = Bar("<=", 17.0)
"""As many as of the members."""


async def measure(quick: bool, say: Callable[[str], None]) -> list[Row]:
    """A row for each arena and lie, and one of honest reducers. Raises LocalFault."""
    return await asyncio.to_thread(_rows, quick, say)


def _rows(quick: bool, say: Callable[[str], None]) -> list[Row]:
    rows = []
    for chunks, seeds in ARENAS.items():
        count = 1 if quick else seeds
        for name, lie in LIES.items():
            say(f"{name}, {chunks:,} chunks")
            found = [_play(chunks, lie, seed) for seed in range(count)]
            good = sum(max(rounds, default=-1) < MOST_ROUNDS for rounds in found)
            worst = max(max(rounds, default=-1) + 1 for rounds in found)
            note = f"{count} seeds, {MEMBERS} members, {ROUNDS} rounds; at worst it counts in {worst} rounds"
            title = f"{name}, {chunks:,} chunks: counts no more after {MOST_ROUNDS} rounds"
            rows.append(row(title, 100.0 * good / count, "% of seeds", None if quick else EXCLUDED, note=note))
    found = [_play(12, HONEST, seed) for seed in range(1 if quick else 10)]
    missing = sum(ROUNDS - 4 - len(rounds) for rounds in found)
    rows.append(row("honest reducers: rounds without one of them", missing, "rounds", NEVER))
    found = [_play(12, ABSENT, seed, sample_256=1 << 16) for seed in range(1 if quick else 10)]
    worst = max(ROUNDS - 4 - len(rounds) for rounds in found)
    title = "opens nothing of one round, and all of it later; all chunks are asked for: rounds without it"
    rows.append(row(title, worst, "rounds", ONE_MISS))
    gang = Gang(members=72, chunks=12, tries=1600)
    for number in range(20 if quick else 200):
        gang.play_round(number)
    title = "12 of 72 members chosen for 12 slices, mute: their share of the slices of 200 rounds"
    rows.append(row(title, 100 * gang.share, "%", None if quick else SIXTH))
    return rows


def _play(chunks: int, lie: Lie, seed: int, sample_256: int = ReduceSpec().sample_256) -> list[int]:
    with tempfile.TemporaryDirectory(prefix="atoll-reducers-", dir=_memory()) as folder:
        council = Council(Path(folder), MEMBERS, chunks, lie, seed, shipped(MEMBERS, sample_256))
        return rounds_counted(council, ROUNDS)


def _memory() -> str | None:
    """A folder in memory where there is one: proofs are files."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None
