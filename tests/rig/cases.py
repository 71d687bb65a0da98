"""The published figures of the network: `python -m tests.rig.cases [--attempts 10] [--only punch,relay,nodes]`.

Prints one row per case, its bar, and what was measured; then a row of tracebacks in its logs. Exit code 1 if a bar
is missed, 2 if the lab cannot run. A
case that cannot run here says so, and is no pass. The published figures are of 100 attempts.
"""

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll_lab.capability import missing
from atoll_lab.lab import Nat
from atoll_lab.namespaces import LabError
from atoll_lab.sweep import scratch
from tests.rig import node_cases, punch_cases, upnp_cases, wan_cases
from tests.rig.__main__ import STOPPED, stop
from tests.rig.remote import OrderFailed
from tests.rig.tables import Row
from tests.tracebacks import tracebacks


def groups(attempts: int) -> dict[str, Callable[[Path], Sequence[Row]]]:
    """Return the cases by name. Each plays in a folder, with all of its logs there."""
    return {
        "punch": lambda folder: [punch_cases.punched(attempts, folder)],
        "relay": lambda folder: [punch_cases.relayed(nat, attempts, folder) for nat in (Nat.SYMMETRIC, Nat.NOUDP)],
        "nodes": lambda folder: node_cases.all_rows(max(3, attempts // 10), folder),
        "upnp": upnp_cases.mapped,
        "cap": lambda folder: [wan_cases.capped(folder)],
        "wan": wan_cases.all_rows,
    }


def played(name: str, case: Callable[[Path], Sequence[Row]]) -> list[Row]:
    """Play a case in a folder of its own. Return its rows, and one of the tracebacks in its logs."""
    with scratch() as folder:
        try:
            rows = list(case(Path(folder)))
        except (LabError, OrderFailed) as error:
            rows = [Row(name, "", f"ended: {error}", holds=False)]
        found = tracebacks(Path(folder))
    # What was not run left no logs, and none of these is a pass.
    if any(row.holds is not None for row in rows):
        rows.append(Row(f"{name}: tracebacks in the logs", "0", "; ".join(found) or "0", not found))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser("python -m tests.rig.cases")
    parser.add_argument("--attempts", type=int, default=10)
    parser.add_argument("--only", default="punch,relay,upnp,nodes,cap,wan")
    given = parser.parse_args(arguments)
    if (lack := missing()) is not None:
        print(f"NOT RUN: {lack}", file=sys.stderr)
        return 2
    began_s = time.monotonic()
    print(f"{time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    rows: list[Row] = []
    for name in given.only.split(","):
        found = played(name, groups(given.attempts)[name])
        rows += found
        for row in found:
            print(row, flush=True)
    counts = Counter(row.holds for row in rows)
    took = f"{(time.monotonic() - began_s) / 60:.1f} min"
    print(f"{counts[True]} pass, {counts[False]} miss, {counts[None]} not run; {given.attempts} attempts, {took}")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
