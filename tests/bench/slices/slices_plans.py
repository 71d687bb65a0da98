"""The arms of `bench slices`: which run each trains, and which slices each member trains in it."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols import codec
from atoll.protocols.ids import digest
from atoll.protocols.ledger.ownership import Announced, assigned
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import SLICE_MULTIPLE
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.experts.experts_members import MEMBERS, identity_of

SOURCE = "builtin:shakespeare"
SLICES = 4
WARMUP = 20
"""One step in so many warms the rate up."""


class Arm(NamedTuple):
    """One training run of a bench."""

    kind: str
    """A key of ARMS."""
    preset: str
    steps: int
    """Inner steps of a round (H)."""
    total: int
    """Inner steps of a member in the whole run, at least."""
    seed: int
    batch: int
    """Sequences of a member's step; 0: those of the preset."""
    slice_lr: float = 1.0
    """Rate of the slices, in units of that of all other parameters."""

    @property
    def name(self) -> str:
        """What a stored curve is filed under: the arm and the run's own id, so that no old recipe is read."""
        recipe = codec.encode(spec_of(self))
        return f"{self.kind}-{self.preset}-H{self.steps}-seed{self.seed}-{digest(recipe).hex()[:8]}"


ARMS = {
    "whole": "four members, each trains all",
    "one": "four members, one holder of each slice",
    "two": "four members, two holders of each slice",
    "mixed": "two members train all, two train one slice each",
    "pair": "two members, each trains all",
}


def spec_of(arm: Arm) -> RunSpec:
    """The preset's recipe in equal rounds without overlap, its feed-forward in four slices."""
    spec = preset(arm.preset, identity_of(0).peer_id, arm.seed, SOURCE)
    rounds = -(-arm.total // arm.steps)
    most = SLICES * SLICE_MULTIPLE
    model = replace(spec.model, ffn=max(most, spec.model.ffn // most * most), ffn_slices=SLICES)
    outer = replace(
        spec.outer,
        rounds=rounds,
        stages=(Stage(0, arm.steps),),
        overlap_steps=0,
        holders={"one": 1, "two": 2, "mixed": MEMBERS}.get(arm.kind, 0),
    )
    inner = replace(
        with_adamw(spec.inner),  # as its figures were measured, whatever the preset has
        total_steps=rounds * arm.steps,
        warmup_steps=rounds * arm.steps // WARMUP,
        batch=arm.batch or spec.inner.batch,
        expert_lr=arm.slice_lr,
    )
    found = replace(spec, name="bench", model=model, outer=outer, inner=inner, reduce=None)
    found.check()
    return found


def shares_of(arm: Arm) -> Mapping[int, bytes]:
    """Bitmaps of the slices that each member trains, in all rounds."""
    if arm.kind in ("whole", "pair"):
        return dict.fromkeys(range(MEMBERS if arm.kind == "whole" else 2), ALL)
    if arm.kind == "mixed":
        return {0: ALL, 1: ALL, 2: bitmap_of([0], SLICES), 3: bitmap_of([1], SLICES)}
    spec = spec_of(arm)
    rooms = {identity_of(slot).peer_id: Announced(frozenset(), SLICES) for slot in range(MEMBERS)}
    found = assigned(spec.id, SLICES, spec.outer.holders, rooms)
    return {slot: bitmap_of(found[identity_of(slot).peer_id], SLICES) for slot in range(MEMBERS)}
