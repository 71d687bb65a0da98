"""What the daemon asks the worker about pulls; members of the unions in protocols/local/worker_messages.py."""

import msgspec

from atoll.protocols.ids import Round


class DifferenceRequest(msgspec.Struct, frozen=True, array_like=True, tag="difference"):
    """Write what was trained in this round so far, the round's base minus the local weights, as a payload."""

    round: Round
    path: str
    """Path of the file to write."""


class DifferenceReply(msgspec.Struct, frozen=True, array_like=True, tag="differs"):
    """Answer to difference."""

    is_written: bool
    """False if this round is not the one at hand, nor the newest that was trained."""


class MixRequest(msgspec.Struct, frozen=True, array_like=True, tag="mix"):
    """Mix a neighbour's difference into the local weights. Answered with failed(DecodeError) if it is none."""

    round: Round
    path: str
    """File that holds its payload."""


class MixReply(msgspec.Struct, frozen=True, array_like=True, tag="mixed"):
    """Answer to mix."""

    is_mixed: bool
    """False if the round has no steps left here: the payload came too late."""
