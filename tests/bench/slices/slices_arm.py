"""Child of `bench slices`: one arm, round by round; or what a member with one slice costs."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.node.learning.data.dataset import open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.p2p.system.quick_end import end_process
from atoll_bench.child import Orders, obey
from atoll_bench.experts.experts_arm import TrialRounds
from atoll_bench.experts.experts_trial import Trial
from atoll_bench.slices.slices_costs import held, paces, payloads
from atoll_bench.slices.slices_plans import Arm, shares_of, spec_of


class Training(TrialRounds):
    """The trial that the child runs."""

    async def trial(self, folder: str, arm: Sequence[Any], device: str = "cpu") -> None:
        """Make ready. Raises ConfigError, NetworkFault."""
        chosen = Arm(*arm)
        spec, shares = spec_of(chosen), shares_of(chosen)
        data = open_dataset(spec.data, spec.model.context, "", default_cache(), None)
        self.points = Trial(spec, data, len(shares), Path(folder), device).rounds(lambda _: shares)


async def main() -> None:
    """Until standard input ends."""
    training = Training()
    costs: Orders = {"held": held, "paces": paces, "payloads": payloads}
    await obey({"trial": training.trial, "trial_round": training.trial_round, **costs})


if __name__ == "__main__":
    asyncio.run(main())
    end_process()
