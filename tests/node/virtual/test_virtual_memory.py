"""What whole nodes hold more after each round, once the tables of the newest rounds are full: virtual time.

What stays for good is small. A soak of real nodes cannot tell a kilobyte a round from the noise of its allocators
within minutes (docs/chaos.md).
"""

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from atoll.node.daemon.consensus import machine as consensus
from atoll.node.daemon.consensus import presence
from atoll.node.daemon.coordinator import finalizer
from atoll.node.daemon.telemetry import round_rows, validators
from atoll.p2p.gossip import gossip, push_trees
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols import identity
from tests.waiting import HANGS_S

NODES, ROUND_S = 3, 2.0
TABLES_S = 20.0
"""How long messages are remembered, here: so that ten rounds fill the tables."""
WARM, LAST = 70, 100
"""The caches for 64 rounds are full before."""
MOST_BYTES = 320
"""Of a node and round; 251 to 260 are seen, 152 in rounds 90 to 120. Of its own work that counted 169 stay, and
steps of dicts. An hour of rounds of 3 s has 1,200."""
OURS = tuple(tracemalloc.Filter(True, f"*/{room}/*") for room in ("protocols", "p2p", "node/daemon"))


@pytest.fixture
def small_tables(monkeypatch):
    """Tables with limits, with smaller ones: their growth is no leak. Keys remember nothing, as in a node."""
    monkeypatch.setattr(identity, "Ed25519PublicKey", Ed25519PublicKey)
    monkeypatch.setattr(push_trees, "KNOWN_S", TABLES_S)
    monkeypatch.setattr(gossip, "RECENT_BYTES", 1 << 16)
    monkeypatch.setattr(round_rows, "HELD_ROWS", 8)
    monkeypatch.setattr(consensus, "DECIDED_KEPT", 16)
    monkeypatch.setattr(presence, "FOUND_KEPT", 1)
    monkeypatch.setattr(finalizer, "REMEMBERED", 8)
    monkeypatch.setattr(validators, "OWN_STATES", 8)


def test_a_round_leaves_hardly_anything_in_memory():
    """In a process of its own: what other tests left in its caches moved the figure from 250 to 353."""
    inner = f"{__file__}::{test_bytes_that_a_round_leaves.__name__}"
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", "measure", inner]
    ran = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=HANGS_S
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "1 passed" in ran.stdout


@pytest.mark.measure
def test_bytes_that_a_round_leaves(world, small_tables, capsys):
    async def story():
        async with world(4000, NODES, overlap_steps=4) as w:
            for number in range(NODES):
                w.start(number, ROUND_S)
            found = []
            for number in (WARM, LAST):
                await w.until(lambda number=number: w.all_final(number))
                gc.collect()
                found.append(tracemalloc.take_snapshot().filter_traces(OURS))
            for node in w.nodes.values():
                proven = [authors for _, authors in node.driver.finality.decided.values()]
                assert len({id(authors) for authors in proven}) == len(set(proven)), "equal sets are one object"
            return found

    tracemalloc.start()
    try:
        before, after = run_virtual(story())
    finally:
        tracemalloc.stop()
    lines = [line for line in after.compare_to(before, "lineno") if "/tests/" not in line.traceback[0].filename]
    lines = [line for line in lines if "/transports/memory/" not in line.traceback[0].filename]
    per_round = sum(line.size_diff for line in lines) / NODES / (LAST - WARM)
    with capsys.disabled():
        print(f"\n{per_round:.0f} bytes of a node and round stay in memory")
    most = sorted(lines, key=lambda line: -line.size_diff)[:12]
    assert per_round < MOST_BYTES, "\n".join(map(str, most))
