"""What the final sets of a run say about the reducers of later rounds: the part of a summary that reductions need.

Who is passed over follows from all sets (node/daemon/reduction/places.py), so a node that begins with a summary
must find it there.
"""

import msgspec

from atoll.protocols.ids import PeerId


class Missed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member whose Reductions missed final sets, `times` in a row; it is done without up to round `until`."""

    peer: PeerId
    times: int
    until: int


class Decided(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What names the reducers of a round."""

    round: int
    authors: tuple[PeerId, ...]
    """Authors of the final set that decides, sorted."""
    absent: tuple[PeerId, ...]
    """Those that are passed over, sorted."""


class ReducerHistory(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that the final sets up to one round say about the reducers of later rounds; empty: none is reduced."""

    missed: tuple[Missed, ...] = ()
    """Sorted by peer."""
    decided: tuple[Decided, ...] = ()
    """The rounds after, as far as final sets decide them; rising."""
