"""A schedule of rounds for a model that is exchanged in fragments (protocols/coverage.py)."""

import msgspec

from atoll.protocols.errors import ConfigError
from atoll.protocols.run import OuterSpec, Stage


def finer(outer: OuterSpec, count: int) -> OuterSpec:
    """The schedule cut into `count` times as many rounds of as many steps in all; a round keeps at least one step.

    Raises ConfigError for a stage whose steps do not divide.
    """
    ends = [stage.first for stage in outer.stages[1:]] + [outer.rounds]
    stages: list[Stage] = []
    first = 0
    for stage, end in zip(outer.stages, ends, strict=True):
        steps = max(1, stage.steps // count)
        if stage.steps % steps:
            raise ConfigError(f"{stage.steps} steps do not divide into {count} rounds")
        stages.append(Stage(first, steps))
        first += (end - stage.first) * stage.steps // steps
    return msgspec.structs.replace(outer, rounds=first, stages=tuple(stages), fragments=count)
