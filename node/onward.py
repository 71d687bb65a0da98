"""A run that goes on from another one's round: the same recipe, from where that one was. Pure."""

from msgspec.structs import replace

from atoll.protocols.run import RunSpec, Stage


def onward(recipe: RunSpec, done: int) -> RunSpec:
    """The rest of a run of which `done` rounds are final: what is left of its rounds, stages and schedule.

    A run that was at its end has as many rounds again, at the rate where it ended.
    """
    outer, inner = recipe.outer, recipe.inner
    rounds = outer.rounds - done if done < outer.rounds else outer.rounds
    first_step = min(1 << 31, inner.first_step + recipe.steps_before(done))
    later = (Stage(stage.first - done, stage.steps) for stage in outer.stages if stage.first > done)
    stages = (Stage(0, recipe.steps(done)), *later)
    return replace(
        recipe,
        outer=replace(outer, rounds=rounds, stages=stages),
        inner=replace(inner, first_step=first_step),
    )
