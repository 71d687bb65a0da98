"""Memory, disk and upload of a member that sends one byte a step, over those of one that trains with AdamW.

    python -m atoll_bench.zeroth_order.costs [--preset 10m]

Two rounds of one step of one sequence in a worker of its own; AdamW recomputes layers, which is its least. Ratios
are within one run; `rss above nothing` leaves out what a worker of the smallest model takes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from atoll.protocols.run.run_spec import RunSpec
from atoll_bench.lora.costs import peak_bytes, spec_of
from atoll_bench.lora.members import GivenMembers, genesis_state, given, write_given
from atoll_bench.zeroth_order.loss import scalar_spec

ARMS = ("nothing", "adamw", "spsa")


def measured(name: str, arm: str, folder: Path) -> dict[str, int]:
    """Figures of one arm, in bytes; to be called in a process of its own. `nothing`: the smallest model."""
    plain = spec_of("tiny" if arm == "nothing" else name)
    start = write_given(folder / "given", plain.model, genesis_state(plain.model, 1))
    spec = given(plain, start, 0) if arm == "adamw" else scalar_spec(_slow(plain), start, 0)
    members = GivenMembers(folder, spec, folder / "given", 1, recompute=arm == "adamw")
    for number in range(2):
        members.round(number)
    newest = max((members.homes[0] / "state").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return {
        "rss": peak_bytes(),
        "state": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
        "payload": members.payload_bytes[0],
        "parameters": spec.model.parameters,
    }


def _slow(spec: RunSpec) -> RunSpec:
    return replace(spec, inner=replace(spec.inner, lr=1e-5))


def main() -> None:
    """Print the figures of each arm as JSON lines, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="10m")
    parser.add_argument("--arm", choices=ARMS, help="one arm, in this process")
    args = parser.parse_args()
    if args.arm:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            print(json.dumps(measured(args.preset, args.arm, Path(folder))))
        return
    found = {arm: _in_child(args.preset, arm) for arm in ARMS}
    for arm, figures in found.items():
        print(json.dumps({"arm": arm, **figures}))
    nothing, whole = found["nothing"]["rss"], found["adamw"]
    ratios = {key: found["spsa"][key] / whole[key] for key in ("rss", "state", "payload")}
    ratios["rss above nothing"] = (found["spsa"]["rss"] - nothing) / (whole["rss"] - nothing)
    print(json.dumps({"spsa over adamw": {key: round(value, 6) for key, value in ratios.items()}}))


def _in_child(name: str, arm: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "atoll_bench.zeroth_order.costs", "--preset", name, "--arm", arm]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
