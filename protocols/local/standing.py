"""Who counts less than in full, as the operator is told: a part of control_messages.py."""

import msgspec


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A member that the run's owner excluded: its PeerID, the first round without it, and what the owner wrote."""

    peer: str
    round: int
    reason: str


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What one member counts for, by what this node knows."""

    peer: str
    """PeerID of the member."""
    votes_in: int = 0
    """More final rounds with its work until it votes (probation); 0: it may."""
    weight_16: int = 16
    """16ths of the weight that it claims which count: 0 by audits, a share where others sent its payload."""
    verdicts: int | None = None
    """Verdicts on its work that count; null: the run has no audits."""
    shown: float | None = None
    """Standard deviations of work that these verdicts show together."""
    usual: float | None = None
    """Deviations that as many verdicts on the others' work show."""
    distrusted_until: int | None = None
    """Last round in which no Reduction of it counts; null: they count."""
    why: str = ""
    """What of this takes something from it, in one line; empty: it counts in full."""
