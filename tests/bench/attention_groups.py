"""The loss of runs whose members train some key/value groups of each attention layer; prints JSON lines.

    python -m tests.bench.attention_groups --holders 1 --rate 2 --seed 1 [--ffn]

Four members and four groups: the rows of a group's queries, keys and values, and its columns of the output. A
member keeps the rest of these matrices at the view, and sends chunks of its own groups only. With `--ffn` the
feed-forward is cut likewise, so that a member trains one of four parts of every layer. `--holders 4`: all train
all.

A chunk is folded over those that cover it. AdamW works value by value, so a masked step is the step of a slice.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.model import bridge
from atoll.node.learning.outer.fixed import plus, to_fixed, to_float
from atoll.node.learning.outer.mean import Weighted, outer_update
from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols.ids import peer_id_of
from atoll.protocols.run.arena import CHUNK, Arena, arena_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.inner_steps import run_steps
from atoll_bench.module_values import fill_module, read_module
from atoll_bench.reference_arms.baselines import Point, Task
from tests.plain import feedback, sparse2

GROUPS = MEMBERS = 4
ROWS, COLUMNS = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
FFN_ROWS, FFN_COLUMNS = ("gate_proj", "up_proj"), ("down_proj",)


def spec_of(seed: int, steps: int, total: int) -> RunSpec:
    """`tiny` with four key heads of 64 and 256 hidden units, in equal rounds, with AdamW."""
    spec = preset("tiny", peer_id_of(bytes(range(32))), seed)
    rounds = -(-total // steps)
    model = replace(spec.model, heads=GROUPS, kv_heads=GROUPS, head_size=64, ffn=64 * GROUPS)
    inner = replace(with_adamw(spec.inner), total_steps=rounds * steps, warmup_steps=rounds * steps // 20)
    outer = replace(spec.outer, rounds=rounds, stages=(Stage(0, steps),), overlap_steps=0)
    found = replace(spec, model=model, inner=inner, outer=outer, reduce=None)
    found.check()
    return found


def trained(model: ModelSpec, groups: set[int], *, cuts_ffn: bool) -> dict[str, Tensor]:
    """By atom, whether a member with these groups trains each value."""
    found = {}
    for atom in atoms(model):
        mask = torch.ones(atom.shape, dtype=torch.bool)
        part = atom.name.removesuffix(".weight").rpartition(".")[2]
        is_column = part in COLUMNS + (FFN_COLUMNS if cuts_ffn else ())
        if is_column or part in ROWS + (FFN_ROWS if cuts_ffn else ()):
            width = atom.shape[int(is_column)] // GROUPS
            for group in set(range(GROUPS)) - groups:
                mask.narrow(int(is_column), group * width, width).fill_(False)
        found[atom.name] = mask
    return found


class Member:
    """One member: whole weights in the module, of which it moves and sends its own."""

    def __init__(self, task: Task, slot: int, masks: Mapping[str, Tensor], rate: float) -> None:
        self._task, self._slot, self._masks, self._rate = task, slot, masks, rate
        self._arena: Arena = arena_of(task.spec.model)
        mask_C4096 = bridge.gather({name: mask.float() for name, mask in masks.items()}, self._arena)
        self.rows = torch.nonzero(mask_C4096.any(1)).flatten()
        self._residual = torch.zeros((len(self.rows), CHUNK))
        self._inner = task.inner()
        for name, parameter in self._inner.module.named_parameters():
            parameter.register_hook(masks[name].mul)  # type: ignore[no-untyped-call]

    def step(self, window_BT1: NDArray[np.int64], at: int) -> float:
        """One inner step of what is trained; cut matrices move at `rate` times the rate, as slices do."""
        named = dict(self._inner.module.named_parameters())
        cut = {name: named[name].detach().clone() for name, mask in self._masks.items() if not bool(mask.all())}
        loss = self._inner.step(window_BT1, at)
        with torch.no_grad():
            for name, before in cut.items():
                # AdamW's move and its decay are both linear in the rate.
                moved = before + self._rate * (named[name] - before)
                named[name].copy_(torch.where(self._masks[name], moved, before))
        return loss

    def round(self, number: int, view_C4096: Tensor) -> Weighted:
        """Train a round from the view; the payload's tables, of `rows`."""
        task = self._task
        fill_module(self._inner.module, view_C4096, self._arena)
        steps = run_steps(
            self.step,
            lambda step: task.batch(number, self._slot, step),
            task.spec.steps_before(number),
            task.spec.steps(number),
        )
        list(steps)
        delta = (view_C4096 - read_module(self._inner.module, self._arena))[self.rows]
        compress = task.spec.compress
        payload = feedback.feed(self._residual, delta, compress.feedback, compress.k)
        return (1, *sparse2.decode(payload, len(self.rows), compress.k))


def rounds(task: Task, holders: int, rate: float, *, cuts_ffn: bool) -> Iterator[Point]:
    """A Point for each round."""
    began, arena, outer = time.monotonic(), arena_of(task.spec.model), task.spec.outer
    members = []
    for slot in range(MEMBERS):
        groups = {(slot + more) % GROUPS for more in range(holders)}
        members.append(Member(task, slot, trained(task.spec.model, groups, cuts_ffn=cuts_ffn), rate))
    covering = defaultdict(list)
    for row in range(arena.chunks):
        covering[tuple(slot for slot, one in enumerate(members) if row in set(one.rows.tolist()))].append(row)
    theta = to_fixed(task.genesis_C4096())
    judge = task.inner().module
    for number in range(task.rounds):
        view = to_float(theta)
        sent = [member.round(number, view) for member in members]
        for slots, chunks in covering.items():
            at = torch.tensor(chunks)
            parts = []
            for slot in slots:
                weight, index, q = sent[slot]
                own = torch.searchsorted(members[slot].rows, at)
                parts.append((weight, index[own], q[own]))
            theta[at] = plus(theta[at], outer_update(parts, len(at), outer.alpha_256, outer.floor_256))
        fill_module(judge, to_float(theta), arena)
        yield task.point(number, [0.0], judge, began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--holders", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--total", type=int, default=384)
    parser.add_argument("--ffn", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    spec = spec_of(given.seed, given.steps, given.total)
    data = open_dataset(spec.data, spec.model.context, "", default_cache())
    task = Task(spec, data, MEMBERS, spec.outer.rounds)
    for point in rounds(task, given.holders, given.rate, cuts_ffn=given.ffn):
        if point.round % 6 == 5 or point.round == spec.outer.rounds - 1:
            print(json.dumps({**vars(given), "round": point.round, "val_bpb": point.val_bpb}), flush=True)


if __name__ == "__main__":
    main()
