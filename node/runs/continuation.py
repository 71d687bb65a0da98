"""A run that goes on from another one's round: the same recipe, from where that one was. Pure."""

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.protocols.run.merging import MergeSpec
from atoll.protocols.run.run_spec import SPEC_VERSION, RunSpec, Stage


def continuation_of(recipe: RunSpec, done: int) -> RunSpec:
    """The rest of a run of which `done` rounds are final: what is left of its rounds, stages and schedules.

    A run that was at its end has as many rounds again, at the rate where it ended.
    """
    outer, inner = recipe.outer, recipe.inner
    rounds = outer.rounds - done if done < outer.rounds else outer.rounds
    first_step = min(1 << 31, inner.first_step + recipe.steps_before(done))
    later = (Stage(stage.first - done, stage.steps) for stage in outer.stages if stage.first > done)
    stages = (Stage(0, recipe.steps(done)), *later)
    return replace(
        recipe,
        version=SPEC_VERSION,
        outer=replace(outer, rounds=rounds, stages=stages, merge=_merging(outer.merge, done)),
        inner=replace(inner, first_step=first_step),
    )


def _merging(spec: MergeSpec | UnsetType, done: int) -> MergeSpec | UnsetType:
    """α goes on falling along the same line, to 0 in the same round; its first value is rounded down."""
    if not spec or done >= spec.until:
        return UNSET
    left = spec.until - done
    alpha_4096 = spec.alpha_4096 * left // spec.until
    return replace(spec, until=left, alpha_4096=alpha_4096) if alpha_4096 else UNSET
