"""One arm of the calibration of a preset, in one process and one thread; prints JSON lines.

    python -m tests.bench.calibrate sparse --members 4 --stages 0:2,8:8 --rounds 54 --lr 4e-3 --k 128

Arms: `dp` (data-parallel AdamW), `diloco` (Nesterov 0.9, outer rate `--outer-rate`), `average` (plain averaging),
`sparse` (the product's codec, error feedback, integer aggregation and fixed-point weights, without the network).
With `--delay` inner steps the folds come late and `--rule` merges them; `--fragments` take turns in finer rounds;
with `--reduced-k K` the mean goes through reducers that keep K values of each chunk.
Everything after the arm's name replaces a number of the preset.
"""

import argparse
import json
import sys
from collections import deque

import msgspec
import torch

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.runs import presets
from atoll.node.runs.presets import finer, with_adamw
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.module_values import fill_module
from atoll_bench.reference_arms.baselines import AVERAGE, DILOCO, Task, data_parallel, dense_diloco
from tests.bench.delayed import LateRule, delayed_sparse

KEPT = (64, 128, 256)
DECAYS = (0.5, 0.7, 0.8, 0.9)
PLAIN_ROUNDS = (2, 4, 8)
OWNER = peer_id_of(bytes(range(32)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=["dp", "diloco", "average", "sparse"])
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--source", default="builtin:shakespeare")
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--outer-rate", type=float, default=DILOCO.rate, help="of diloco")
    parser.add_argument("--present", type=float, default=1.0)
    parser.add_argument("--stages", default="")
    parser.add_argument("--rule", choices=["rebase", "forecast", "blend"], default="rebase")
    parser.add_argument("--keep", type=float, default=1.0, help="kappa of rebase and forecast, alpha of blend")
    parser.add_argument("--delay", type=int, default=0, help="inner steps until a fold is merged")
    parser.add_argument("--fragments", type=int, default=1)
    parser.add_argument("--reduced-k", type=int, help="values of a chunk that reducers keep")
    parser.add_argument("--quantized", action="store_true", help="moments in eight bits")
    parser.add_argument("--cosine", action="store_true", help="in place of a preset's stable rate and decay")
    # Interned: msgspec leaves out a default only where it is the same object.
    parser.add_argument("--optimizer", choices=["adamw", "muon"], type=sys.intern)
    for name in ("--lr", "--lr-min", "--beta2", "--feedback", "--muon-lr", "--muon-momentum"):
        parser.add_argument(name, type=float)
    for name in (
        "--rounds",
        "--batch",
        "--warmup-steps",
        "--decay-256",
        "--alpha",
        "--floor",
        "--k",
        "--layers",
        "--dim",
        "--ffn",
    ):
        parser.add_argument(name, type=int)
    parser.add_argument("--every", type=int, default=10)
    return parser.parse_args()


def spec_of(given: argparse.Namespace) -> RunSpec:
    def pick(value: msgspec.Struct, **names: str) -> dict[str, object]:
        return {field: v for field, arg in names.items() if (v := getattr(given, arg)) is not None}

    spec = presets.preset(given.preset, OWNER, given.seed, given.source)
    outer = msgspec.structs.replace(
        spec.outer, **pick(spec.outer, alpha_256="alpha", floor_256="floor", rounds="rounds")
    )
    if given.stages:
        pairs = [part.split(":") for part in given.stages.split(",")]
        outer = msgspec.structs.replace(outer, stages=tuple(Stage(int(a), int(b)) for a, b in pairs))
    outer = finer(outer, given.fragments)
    spec = msgspec.structs.replace(
        spec,
        outer=outer,
        reduce=None,
        model=msgspec.structs.replace(spec.model, **pick(spec.model, layers="layers", dim="dim", ffn="ffn")),
        compress=msgspec.structs.replace(spec.compress, **pick(spec.compress, k="k", feedback="feedback")),
    )
    keys = "lr", "lr_min", "batch", "warmup_steps", "decay_256", "beta2", "optimizer", "muon_lr", "muon_momentum"
    names = {key: key for key in keys}
    recipe = with_adamw(spec.inner) if given.optimizer == "adamw" else spec.inner
    if given.cosine:
        recipe = msgspec.structs.replace(recipe, decay_256=msgspec.UNSET)
    inner = msgspec.structs.replace(
        recipe, total_steps=spec.steps_before(outer.rounds), **pick(spec.inner, **names)
    )
    spec = msgspec.structs.replace(spec, inner=inner)
    spec.check()
    return spec


class Captured:
    """How much of the pseudo-gradients' squared norm the k largest values of each chunk hold."""

    def __init__(self) -> None:
        self._kept = dict.fromkeys(KEPT, 0.0)
        self._whole = 0.0

    def add(self, number: int, delta_F4096: torch.Tensor) -> None:
        """One contribution."""
        squares_F4096, _ = delta_F4096.double().square().sort(descending=True)
        self._whole += float(squares_F4096.sum())
        for k in KEPT:
            self._kept[k] += float(squares_F4096[:, :k].sum())

    def shares(self) -> dict[str, float]:
        """By k, of all contributions since the last call."""
        found = {f"captured_{k}": self._kept[k] / self._whole for k in KEPT} if self._whole else {}
        self._kept, self._whole = dict.fromkeys(KEPT, 0.0), 0.0
        return found


class Averages:
    """Averages of Θ over the last rounds, in float32: by decay, and plain ones of the last K rounds."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._theta: deque[torch.Tensor] = deque(maxlen=max(PLAIN_ROUNDS))
        self._decayed: dict[float, torch.Tensor] = {}

    def add(self, number: int, theta_C4096: torch.Tensor) -> None:
        """Θ after a round."""
        self._theta.append(theta_C4096.clone())
        for decay in DECAYS:
            # The bias correction of a young average: its decay is at most that of a plain mean of all rounds.
            now = min(decay, number / (number + 1))
            old = self._decayed.get(decay, theta_C4096)
            self._decayed[decay] = now * old + (1 - now) * theta_C4096

    def losses(self) -> dict[str, float]:
        """Validation bits per byte of each average."""
        found = {f"ema_{decay}": self._score(value) for decay, value in self._decayed.items()}
        for count in (count for count in PLAIN_ROUNDS if len(self._theta) >= count):
            newest = list(self._theta)[-count:]
            found[f"mean_{count}"] = self._score(torch.stack(newest).mean(0))
        return found

    def _score(self, theta_C4096: torch.Tensor) -> float:
        module = self._task.inner().module
        fill_module(module, theta_C4096, arena_of(self._task.spec.model))
        return self._task.score(module).val_bpb


def main() -> None:
    given = arguments()
    torch.set_num_threads(given.threads)
    spec = spec_of(given)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    task = Task(spec, data, given.members, spec.outer.rounds, given.device, quantized=given.quantized)
    rule, captured, averages = LateRule(given.rule, given.keep), Captured(), Averages(task)
    arms = {
        "dp": lambda: data_parallel(task, given.lr_scale),
        "diloco": lambda: dense_diloco(task, DILOCO._replace(rate=given.outer_rate)),
        "average": lambda: dense_diloco(task, AVERAGE),
        "sparse": lambda: delayed_sparse(
            task, rule, given.delay, given.fragments, given.present, given.reduced_k, captured.add, averages.add
        ),
    }
    for point in arms[given.arm]():
        last = point.round == spec.outer.rounds - 1
        if last or point.round // given.fragments % given.every == 0:
            row = {
                "arm": given.arm,
                "parameters": spec.model.parameters,
                "steps": spec.steps_before(point.round + 1),
            }
            print(
                json.dumps({**row, **msgspec.to_builtins(point), **captured.shares(), **averages.losses()}),
                flush=True,
            )


if __name__ == "__main__":
    main()
