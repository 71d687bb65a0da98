"""The long part of `bench experts`: the loss of a mixture whose experts are shared out, beside one trained whole.

Both are swarms of real nodes on loopback (`atoll sim`), with equal tokens, the same seed and the same text.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.cli.benches.report import Bar, Row, row
from atoll.cli.sim import simulate

LOSS = Bar("<=", 1.02)
PRESET, NODES, ROUNDS, STEPS, SEED = "moe-12m", 4, 24, 8, 1
EQUAL_TOKENS = ("pace.least_256=256", "pace.quorum_256=256")
"""Every member takes all steps, and every round waits for all members."""
TIMEOUT_S = 4 * 3600.0
ARMS = {"whole": 0, "shared": 1}
"""Name -> holders of each expert; 0: all members train all."""


async def loss_rows(say: Callable[[str], None]) -> list[Row]:
    """Validation loss after the last round, and what else the swarms promise."""
    reports = {name: await asyncio.to_thread(report_of, holders, say) for name, holders in ARMS.items()}
    return rows_of(reports)


def report_of(holders: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The report of one swarm."""
    say(f"{NODES} nodes train {PRESET}, {ROUNDS} rounds of {STEPS} steps, holders {holders}")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        return simulate(
            *(Path(folder), TIMEOUT_S, say),
            nodes=NODES,
            rounds=ROUNDS,
            steps=STEPS,
            seed=SEED,
            preset_name=PRESET,
            holders=holders,
            changes=EQUAL_TOKENS,
            data="builtin:shakespeare",
            from_hf=None,
            upcycle=None,
            kill=False,
            late_join=False,
            baselines=False,
        )


def rows_of(reports: dict[str, dict[str, Any]]) -> list[Row]:
    """A row for each arm, then the comparison."""
    bpb = {name: report["val_bpb"] for name, report in reports.items()}
    rows = [
        row(f"loss, experts {name}", value, "bits/byte", note=_broken(reports[name]))
        for name, value in bpb.items()
    ]
    metric = "loss at equal tokens, shared / whole"
    if None in bpb.values():
        return [*rows, row(metric, None, "x", LOSS, note="a swarm did not evaluate")]
    return [*rows, row(metric, bpb["shared"] / bpb["whole"], "x", LOSS, note="one seed")]


def _broken(report: dict[str, Any]) -> str:
    wrong = [f"{check['name']}: {check['seen']}" for check in report["checks"] if not check["ok"]]
    return "; ".join(wrong)
