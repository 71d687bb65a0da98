"""The finality machine of a node at the beginning of a round whose voters are known."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from atoll.node.daemon.consensus import machine as finality
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.ids import PeerId, RunId

LAST = 5000
"""Rounds of the run: no test comes to its end."""


def before_round(
    number: int, run: RunId, me: PeerId, owner: PeerId, *, voters: Sequence[PeerId], gone: Iterable[PeerId] = (),
    **timing: float,
) -> FinalityState:  # fmt: skip
    """All rounds before `number` are final, and were decided by `voters`; of `gone` there was work, too.

    `timing`: see `machine.begin`.
    """
    decided = {at: (tuple(voters), frozenset({*voters, *gone})) for at in range(number)}
    start = finality.begin(run, me, LAST, owner, **timing)
    return replace(start, last_final=number - 1, applied=number - 1, voters=tuple(voters), decided=decided)
