"""What a worker's Θ_final may be when it starts: of the run's start, of this chain, or of another one. Pure."""

from collections.abc import Callable, Sequence

from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochBook, Segment
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


def is_other(found: tuple[Round, Digest], action: FinalizeRound, leave: Callable[[Round, Digest], bool]) -> bool:
    """Whether the state that a worker found is of another chain, which is left.

    `found`: the newest round in it, and the state; it may be ahead of all that the ledger knew at the start.
    `leave` begins again without it if a chain has it. Raises Divergence if none has, LocalFault.
    """
    number, state = found
    if number != action.round or state == action.state:
        return False
    if not leave(number, state):
        raise divergence(action, state)
    return True


def first_of_epochs(chain: Sequence[Segment], book: EpochBook) -> Round | None:
    """The first round that an epoch decides, of this chain or of another one; None: no epoch began.

    The chain of the state may have left this one at any of them, and this one may have none.
    """
    here, began = (
        {segment.first for segment in chain if segment.epoch != ROOT},
        {number for _, number in book.places},
    )
    first = min(here | began, default=None)
    return None if first is None else Round(first)
