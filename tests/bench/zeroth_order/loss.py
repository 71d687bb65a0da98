"""Loss of a fine-tuning by one byte a step, from given weights.

    python -m atoll_bench.zeroth_order.loss --text FILE [--seeds 1 2] [--arms whole:2e-4 8:1e-3] [--rounds 8]

A `tiny` base is trained on Shakespeare by one member, then two members go on with another text: with all weights,
or with adapters of a rank. A seed is of the directions and of the order of the text; the base is the same. An arm
is RANK:RATE or whole:RATE. Prints a JSON line for some of the validations.
"""

import argparse
import json
import shutil
import tempfile
import time
from itertools import product
from pathlib import Path

import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.learning.outer.fixed import state_digest
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec, StartSpec
from atoll.protocols.run.sections.compression import CompressSpec
from atoll_bench.lora.loss import WHOLE, base_of, spec_of
from atoll_bench.lora.members import GivenMembers, given, write_given

STEPS, BATCH, PARTS, CLIP = 32, 4, 4, 4.0


def scalar_spec(spec: RunSpec, start: StartSpec, rank: int) -> RunSpec:
    """The run in zeroth-order steps from these weights; `rank` 0: of all of them."""
    inner = replace(spec.inner, optimizer="spsa", weight_decay=0.0, clip=CLIP, lr_min=0.1)
    compress = CompressSpec(codec="scalar", k=spec.steps(0), feedback=0.0)
    made = given(replace(spec, inner=inner, compress=compress, serving=UNSET), start, rank)
    made.check()
    return made


def main() -> None:
    """Train the base of each seed, then each arm from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="what is tuned on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--arms", nargs="+", default=["whole:2e-4", "8:1e-3"], help="RANK:RATE or whole:RATE")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--base", type=Path, help="a base that an earlier call has trained; written if not there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        weights, start = _base(Path(folder), args.base)
        for number, (seed, words) in enumerate(product(args.seeds, args.arms)):
            kind, _, rate = words.partition(":")
            plain = spec_of(seed, f"file:{args.text.name}", args.rounds, STEPS, BATCH, float(rate))
            spec = scalar_spec(plain, start, 0 if kind == WHOLE else int(kind))
            members = GivenMembers(Path(folder) / str(number), spec, weights, 2, str(args.text))
            about, began = {"seed": seed, "arm": words}, time.process_time()
            print(json.dumps(about | {"round": -1, "loss": members.loss()}), flush=True)
            for at in range(args.rounds):
                members.round(at)
                if (at + 1) % max(1, args.rounds // PARTS) == 0:
                    line = {"round": at, "loss": members.loss(), "payload_bytes": members.payload_bytes[0]}
                    print(json.dumps(about | line | {"cpu_s": round(time.process_time() - began)}), flush=True)


def _base(folder: Path, kept: Path | None) -> tuple[Path, StartSpec]:
    """A base and its names: the file that is kept, or one that is trained, and kept where that is wanted."""
    model = spec_of(1, "builtin:shakespeare", 1, 1, 1, 1e-3).model
    if kept is None or not kept.exists():
        trained, start, _ = base_of(folder, 1)
        if kept is not None:
            shutil.copy(trained, kept)
        return trained, start
    found = read_own_snapshot(kept, arena_of(model), state_digest)
    return kept, write_given(folder / "given", model, found.theta_C4096)


if __name__ == "__main__":
    main()
