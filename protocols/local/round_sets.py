"""What requests to the worker name of a round's set: members of worker_messages.py."""

import msgspec

from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.run.arena import Span


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One contribution of a round's set, with its payload on disk."""

    entry: Digest
    """Entry id of the Contribution or Reduction."""
    author: PeerId
    weight: int
    """Weight of the contribution in the mean, in 64ths of the round's nominal tokens."""
    payload: Digest
    path: str
    experts: bytes = b""
    """Bitmap of the experts that the contribution covers; empty: all."""


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """The contributions that count in one slice of a reduced round."""

    span: Span
    """Chunks of the slice."""
    reduced: tuple[Member, ...]
    """The slice's Reduction, if there is one: its weight is the sum over the contributions that it covers."""
    raw: tuple[Member, ...]
    """Contributions that the Reduction does not cover; each path holds a RowsAnswer for this span."""
    ours: bool
    """Whether our own contribution counts in this slice, raw or covered."""


class Counted(msgspec.Struct, frozen=True, array_like=True):
    """One of our own payloads that a final set holds, with the chunks in which it counts."""

    payload: Digest
    """BLAKE3 of the payload of our Contribution or Reduction."""
    spans: tuple[Span, ...]
    """Chunks of the round's cover in which a Contribution counts; empty for a Reduction."""
    round: Round


class ExcisedRound(msgspec.Struct, frozen=True, array_like=True):
    """A final round out of which a later one takes the work of excluded members."""

    round: Round
    members: tuple[Member, ...]
    """All contributions that counted in it so far."""
    gone: tuple[Digest, ...]
    """Entry ids of those that count no more."""
