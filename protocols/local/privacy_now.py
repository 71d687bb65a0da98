"""What a node's contributions say of its data by now, in a run with privacy."""

import msgspec


class PrivacyNow(msgspec.Struct, frozen=True, kw_only=True):
    """The ε of this node so far (docs/privacy.md)."""

    epsilon: float
    """For one sequence of its data, or one example of a package's model; it never falls."""
    delta: float
    uses: int
    """Most steps of this node that used one sequence, in all its life."""
    most: float | None
    """The ε beyond which it begins no round; null: it trains until the end."""
    spent: bool = False
    """Whether it rests because its next round would go beyond `most`."""
