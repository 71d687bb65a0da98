"""What a worker's Θ_final may be when it starts: of the run's start, of this chain, or of another one. Pure."""

from collections.abc import Sequence

from atoll.node.daemon.consensus.chains.epochs import ROOT, Segment
from atoll.node.daemon.consensus.types import FinalizeRound
from atoll.protocols.errors import Divergence
from atoll.protocols.ids import Digest, Round


def other_start() -> Divergence:
    """The fault of start weights that are not those of the run."""
    return Divergence(
        "the saved start weights are not those of the run",
        hint="remove the run's state folder in this home; they are fetched again",
    )


def divergence(action: FinalizeRound, ours: Digest) -> Divergence:
    """The fault of a state that is not the one of the round's certificate."""
    return Divergence(
        f"round {action.round}: our fold gives {ours.hex()[:8]}, the final state is {action.state.hex()[:8]}",
        hint="remove the run's state folder in this home; a new start fetches a snapshot",
    )


def first_of_epochs(chain: Sequence[Segment]) -> Round | None:
    """The first round that an epoch of this chain decides; None: it has no epoch."""
    first = min((segment.first for segment in chain if segment.epoch != ROOT), default=None)
    return None if first is None else Round(first)
