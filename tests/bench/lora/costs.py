"""Memory, disk and upload of a member of a LoRA run, over those of a member that trains the whole model.

    python -m atoll_bench.lora.costs [--preset 50m] [--rank 8]

Two rounds of one step of one sequence in a worker of its own, layers recomputed; ratios are within one run.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import RunSpec, Stage, StartSpec
from atoll_bench.experts.experts_members import SOURCE, identity_of
from atoll_bench.lora.members import GivenMembers, genesis_state, given, write_given

ARMS = {"nothing": (0, "float32"), "whole": (0, "float32"), "lora": (1, "float32"), "lora bf16": (1, "bfloat16")}
"""Whether there is an adapter, and how the base is stored; `nothing` only loads what all arms load."""


def spec_of(name: str) -> RunSpec:
    """The preset with AdamW, in rounds of one step of one sequence."""
    spec = preset(name, identity_of(0).peer_id, 1, SOURCE)
    outer = replace(spec.outer, stages=(Stage(0, 1),), overlap_steps=0, overlap_most=UNSET)
    return replace(spec, outer=outer, inner=replace(with_adamw(spec.inner), batch=1), reduce=None)


def measured(name: str, arm: str, rank: int, weights: Path, folder: Path) -> dict[str, int]:
    """Figures of one arm, in bytes; to be called in a process of its own."""
    has_adapter, frozen = ARMS[arm]
    spec = spec_of(name if arm != "nothing" else "tiny")
    if arm == "nothing":
        start = write_given(folder / "small", spec.model, genesis_state(spec.model, 1))
        GivenMembers(folder, given(spec, start, 0), folder / "small", 1).round(0)
        return {"rss": peak_bytes()}
    named = {key: Digest(bytes.fromhex(value)) for key, value in _read(weights).items()}
    start = StartSpec(weights=named["weights"], state=named["state"])
    spec = given(spec, start, rank * has_adapter)
    spec.check()
    members = GivenMembers(folder, spec, weights, 1, frozen=frozen, recompute=True)
    for number in range(2):
        members.round(number)
    state = members.homes[0] / "state"
    newest = max(state.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return {
        "rss": peak_bytes(),
        "state": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
        "payload": members.payload_bytes[0],
        "parameters": spec.model.parameters,
    }


def _read(weights: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(weights.with_suffix(".json").read_text())
    return found


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Print the figures of each arm as JSON lines, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="50m")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--arm", choices=ARMS, help="one arm, in this process")
    parser.add_argument("--weights", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        if args.arm:
            one = measured(args.preset, args.arm, args.rank, args.weights, Path(folder))
            print(json.dumps(one))
            return
        weights = Path(folder) / "given.blob"
        model = spec_of(args.preset).model
        start = write_given(weights, model, genesis_state(model, 1))
        named = {"weights": start.weights.hex(), "state": start.state.hex()}
        weights.with_suffix(".json").write_text(json.dumps(named))
        found = {arm: _in_child(args.preset, arm, args.rank, weights) for arm in ARMS}
    for arm, figures in found.items():
        print(json.dumps({"arm": arm, **figures}))
    nothing, whole = found["nothing"]["rss"], found["whole"]
    for arm in ("lora", "lora bf16"):
        ratios = {key: found[arm][key] / whole[key] for key in whole}
        ratios["rss above nothing"] = (found[arm]["rss"] - nothing) / (whole["rss"] - nothing)
        print(json.dumps({"over whole": arm} | {key: round(value, 4) for key, value in ratios.items()}))


def _in_child(name: str, arm: str, rank: int, weights: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "atoll_bench.lora.costs", "--preset", name, "--rank", str(rank)]
    ran = subprocess.run(
        [*command, "--arm", arm, "--weights", str(weights)], check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
