"""Child of `bench experts --loss`: one arm, round by round."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.runs.presets import preset
from atoll.p2p.system.quick_end import end_process
from atoll.protocols.errors import LocalFault
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll.protocols.run.sections.merging import MergeSpec
from atoll_bench.child import obey
from atoll_bench.experts.experts_members import MEMBERS, identity_of
from atoll_bench.experts.experts_plans import plan_of
from atoll_bench.experts.experts_trial import Trial
from atoll_bench.reference_arms.baselines import Point

SOURCE = "builtin:shakespeare"
WARMUP = 20
"""One step in so many warms the rate up."""
EXPERT_LR = 2.0
"""Of experts with one of four holders: √(N / r). Trained whole they lose by it (docs/log)."""
ALPHA_4096, MERGES = 205, 8
"""SPES's α of 0.05 (arXiv 2602.11543), falling to 0 at two thirds of the run; merges until then."""


def spec_of(arm: str, preset_name: str, rounds: int, steps: int, seed: int) -> RunSpec:
    """The preset's recipe in so many equal rounds without overlap; each arm with its better rate of experts."""
    spec = preset(preset_name, identity_of(0).peer_id, seed, SOURCE)
    until = max(1, 2 * rounds // 3)
    merge = MergeSpec(every=max(1, until // MERGES), until=until, alpha_4096=ALPHA_4096)
    outer = replace(
        spec.outer,
        rounds=rounds,
        stages=(Stage(0, steps),),
        overlap_steps=0,
        holders=0 if arm == "whole" else 1,
        merge=merge if arm == "merged" else msgspec.UNSET,
    )
    inner = replace(
        spec.inner,
        total_steps=rounds * steps,
        warmup_steps=rounds * steps // WARMUP,
        expert_lr=1.0 if arm == "whole" else EXPERT_LR,
    )
    spec = replace(spec, name="bench", outer=outer, inner=inner)
    spec.check()
    return spec


class TrialRounds:
    """Rounds of a trial, one for each order of the bench."""

    def __init__(self) -> None:
        self.points: Iterator[Point] = iter(())

    async def trial_round(self) -> Any:
        """Train the next round; its Point. Raises LocalFault when all are trained."""
        point = next(self.points, None)
        if point is None:
            raise LocalFault("this arm is at its end")
        return msgspec.to_builtins(point)


class Arm(TrialRounds):
    """The trial that the child runs."""

    async def trial(self, folder: str, arm: str, preset: str, rounds: int, steps: int, seed: int) -> None:
        """Make ready. Raises ConfigError, NetworkFault."""
        spec = spec_of(arm, preset, rounds, steps, seed)
        data = open_dataset(spec.data, spec.model.context, "", default_cache(), None)
        self.points = Trial(spec, data, MEMBERS, Path(folder)).rounds(plan_of(spec, arm))


async def main() -> None:
    """Until standard input ends."""
    arm = Arm()
    await obey({"trial": arm.trial, "trial_round": arm.trial_round})


if __name__ == "__main__":
    asyncio.run(main())
    end_process()
