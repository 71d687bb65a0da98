"""A run whose model is exchanged in fragments (protocols/ledger/coverage.py): a lower peak rate, not fewer
bytes."""

from msgspec import UNSET
from msgspec.structs import replace

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import OuterSpec, RunSpec, Stage


def fragmented(spec: RunSpec, count: int) -> RunSpec:
    """The run in `count` fragments and as much finer rounds, which are not reduced.

    Raises ConfigError where it has fragments already, or for more of them than the model can have.
    """
    if spec.outer.fragments != 1:
        raise ConfigError(f"the run has {spec.outer.fragments} fragments already", hint="drop --fragments")
    spec = replace(spec, outer=finer(spec.outer, count), reduce=None if count > 1 else spec.reduce)
    spec.check()
    return spec


def finer(outer: OuterSpec, count: int) -> OuterSpec:
    """The schedule in rounds of a `count`-th of the steps: each fragment is exchanged as often as the whole was.

    Steps of a round are whole, at least one, and a stage has whole rounds: it takes as many steps in all as
    before but for half a round. Experts are merged as often as before.
    """
    ends = [*(stage.first for stage in outer.stages[1:]), outer.rounds]
    stages: list[Stage] = []
    first = 0
    for stage, end in zip(outer.stages, ends, strict=True):
        span = min(end, outer.rounds) - stage.first
        if span <= 0:
            break  # the run ends before this stage
        steps = max(1, _nearest(stage.steps, count))
        stages.append(Stage(first, steps))
        first += max(1, _nearest(span * stage.steps, steps))
    merge = outer.merge
    if merge:
        merge = replace(merge, every=count * merge.every, until=count * merge.until)
    return replace(outer, rounds=first, stages=tuple(stages), fragments=count, merge=merge if merge else UNSET)


def _nearest(total: int, parts: int) -> int:
    """total / parts, rounded to the nearest integer, halves up."""
    return (2 * total + parts) // (2 * parts)
