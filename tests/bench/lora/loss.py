"""Loss of a fine-tuning by adapters and of one by all weights, at equal tokens, from the same base.

    python -m atoll_bench.lora.loss --text FILE [--seeds 1 2] [--rates whole=0.001 8=0.003]

A `tiny` base is trained on Shakespeare by one member, then two members go on with another text: with all weights,
or with adapters of a rank, of which K of 4096 values are sent, or all of them in `int8` and nothing is remembered,
which is what other LoRA runs send. Prints a JSON line for each validation.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import SnapshotReply, SnapshotRequest
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.run_spec import RunSpec, Stage, StartSpec
from atoll_bench.experts.experts_members import identity_of
from atoll_bench.lora.members import GivenMembers, genesis_state, given, write_given

BASE_ROUNDS, BASE_STEPS, BASE_BATCH = 10, 30, 8
ROUNDS, STEPS, BATCH, EVERY = 16, 8, 4, 4
WHOLE, DENSE = "whole", "int8"


def spec_of(seed: int, source: str, rounds: int, steps: int, batch: int, rate: float) -> RunSpec:
    """The preset `tiny` with AdamW in equal rounds without overlap."""
    spec = preset("tiny", identity_of(0).peer_id, seed, source)
    total = rounds * steps
    inner = with_adamw(spec.inner)
    inner = replace(inner, lr=rate, batch=batch, warmup_steps=max(1, total // 20), total_steps=total)
    stages = (Stage(0, steps),)
    outer = replace(spec.outer, rounds=rounds, stages=stages, overlap_steps=0, overlap_most=UNSET)
    return replace(spec, inner=inner, outer=outer, reduce=None)


def with_payload(spec: RunSpec, sent_as: str) -> RunSpec:
    """The run whose payloads hold so many of 4096 values, or all as `int8`; as it is if nothing is named."""
    if sent_as == DENSE:
        return replace(spec, compress=replace(spec.compress, codec=DENSE, k=CHUNK, feedback=0.0))
    return replace(spec, compress=replace(spec.compress, k=int(sent_as))) if sent_as else spec


def base_of(folder: Path, seed: int) -> tuple[Path, StartSpec, float]:
    """A base that one member trained on Shakespeare: its file, its names, and its loss there."""
    spec = spec_of(seed, "builtin:shakespeare", BASE_ROUNDS, BASE_STEPS, BASE_BATCH, 3e-3)
    weights = folder / "drawn"
    start = write_given(weights, spec.model, genesis_state(spec.model, seed))
    members = GivenMembers(folder / "base", given(spec, start, 0), weights, 1)
    for number in range(BASE_ROUNDS):
        members.round(number)
    written = members.sessions[0].answer(SnapshotRequest(str(folder / "snapshot")))
    assert isinstance(written, SnapshotReply)
    assert written.round == Round(BASE_ROUNDS - 1)
    found = read_own_snapshot(Path(written.path), arena_of(spec.model), state_digest)
    trained = folder / "trained"
    return trained, write_given(trained, spec.model, found.theta_C4096), members.loss()


def main() -> None:
    """Train the base of each seed, then each arm from it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True, help="what is tuned on")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--rates",
        nargs="+",
        default=["whole=0.001", "8=0.003"],
        help="RANK=RATE, RANK/K=RATE, RANK/int8=RATE or whole=RATE",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
            weights, start, base_loss = base_of(Path(folder), seed)
            print(json.dumps({"seed": seed, "arm": "base on its own text", "loss": base_loss}), flush=True)
            for number, words in enumerate(args.rates):
                arm, _, rate = words.partition("=")
                kind, _, sent_as = arm.partition("/")
                rank = 0 if kind == WHOLE else int(kind)
                plain = spec_of(seed, f"file:{args.text.name}", ROUNDS, STEPS, BATCH, float(rate))
                spec = with_payload(given(plain, start, rank), sent_as)
                spec.check()
                members = GivenMembers(Path(folder) / str(number), spec, weights, 2, str(args.text))
                about = {"seed": seed, "arm": arm, "rate": float(rate)}
                print(json.dumps(about | {"round": -1, "loss": members.loss()}), flush=True)
                for at in range(ROUNDS):
                    members.round(at)
                    if (at + 1) % EVERY == 0:
                        sent = members.payload_bytes[0]
                        line = about | {"round": at, "loss": members.loss(), "payload_bytes": sent}
                        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
