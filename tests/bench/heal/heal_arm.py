"""Child of `bench heal`: one partition after the other."""

import asyncio
from collections.abc import Sequence
from functools import cache

from atoll.node.learning.data.dataset import Dataset, open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.p2p.system.quick_end import end_process
from atoll_bench.byzantine.trial import Case, spec_of
from atoll_bench.child import obey
from atoll_bench.heal.sides import Length, outcome


@cache
def _data() -> Dataset:
    spec = spec_of(Case("mean", None, 0))
    return open_dataset(spec.data, spec.model.context, "", default_cache())


async def heal(seed: int, length: Sequence[int], smaller: int, feedback: float) -> dict[str, float]:
    """Validation after a partition, by way. Raises ConfigError, NetworkFault."""
    return await asyncio.to_thread(outcome, _data(), seed, Length(*length), smaller, feedback)


async def main() -> None:
    """Until standard input ends."""
    await obey({"heal": heal})


if __name__ == "__main__":
    asyncio.run(main())
    end_process()
