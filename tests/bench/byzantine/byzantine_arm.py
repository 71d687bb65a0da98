"""Child of `bench byzantine`: one run after the other."""

import asyncio
from functools import cache
from typing import Any

import msgspec

from atoll.node.learning.data.dataset import Dataset, open_dataset
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.kernels.compiled import Ints
from atoll.p2p.system.quick_end import end_process
from atoll_bench.byzantine.audit_trial import AuditTrial
from atoll_bench.byzantine.mixtures import works_of_windows
from atoll_bench.byzantine.trial import Case, Trial, spec_of
from atoll_bench.child import obey


@cache
def _data() -> Dataset:
    spec = spec_of(Case("mean", None, 0))
    return open_dataset(spec.data, spec.model.context, "", default_cache())


@cache
def _works() -> Ints:
    data = _data()
    return works_of_windows(default_cache(), data.num_windows, data.context)


async def loss(case: Any, rounds: int) -> float:
    """Validation loss of a case. Raises ConfigError, NetworkFault."""
    known = msgspec.convert(case, Case)
    class_W = None if known.dirichlet is None else _works()
    return Trial(known, _data(), class_W=class_W).loss(rounds)


async def audited(seed: int, rounds: int, dirichlet: float | None) -> dict[str, Any]:
    """Who had no weight in which rounds of an audited run. Raises ConfigError, NetworkFault."""
    class_W = None if dirichlet is None else _works()
    trial = AuditTrial(seed, _data(), dirichlet, class_W=class_W)
    found = await asyncio.to_thread(trial.outcome, rounds)
    return {"idle": found.idle, "honest": found.honest, "usual": found.usual}


async def main() -> None:
    """Until standard input ends."""
    await obey({"loss": loss, "audited": audited})


if __name__ == "__main__":
    asyncio.run(main())
    end_process()
