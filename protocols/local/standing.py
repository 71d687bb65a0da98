"""Who is in the run and counts for what, as the operator is told: a part of control_messages.py."""

import msgspec


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A member that is excluded: its PeerID, the first round without it, and what those that excluded it wrote."""

    peer: str
    round: int
    reason: str
    by: str = "owner"
    """`owner`, or `voters`: two thirds of the voters of that round."""
    excise_since: int | None = None
    """First round that its work is taken out of, as far back as payloads are kept; null: none."""
    excised_in: int | None = None
    """The final round whose state was the first without this work; null: that is still to come."""


class VotesAgainst(msgspec.Struct, frozen=True, kw_only=True):
    """Votes to exclude a member, by the voters of the round that is decided next."""

    peer: str
    votes: int
    needed: int
    """Number of votes that exclude it."""
    by_us: bool
    """This node is among those that voted."""


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
    audits_made: int | None = None
    """Audits that this node measured, for itself or as an evaluator; null: of another node, or no audits."""
    audits_adopted: int | None = None
    """Audits for which it adopted what an evaluator measured; null likewise."""
    shown: float | None = None
    """Standard deviations of work that these verdicts show together."""
    usual: float | None = None
    """Deviations that as many verdicts on the others' work show."""
    distrusted_until: int | None = None
    """Last round in which no Reduction of it counts; null: they count."""
    why: str = ""
    """What of this takes something from it, in one line; empty: it counts in full."""


class LedgerUse(msgspec.Struct, frozen=True, kw_only=True):
    """Authors in the ledger, and its size."""

    accepted: int
    """Authors whose work is in a final set, and this node."""
    worked: int
    """Authors of which this node verified a payload, with none in a final set yet."""
    new: int
    """Authors that have shown no work, of `places`."""
    places: int
    """Places of new authors, `ledger_newcomers` in config.toml."""
    pruned: int
    """Authors without work that gave their places to others since the daemon started."""
    disk_bytes: int
    """Size of the ledger's files."""
    records_from: int = 0
    """The first round whose records are here; of those before there is a summary. 0: all are here."""


class LimitUse(msgspec.Struct, frozen=True, kw_only=True):
    """The `[limits]` in force now, and this month's traffic. Null: no limit."""

    up_bytes_s: float | None
    """Upload limit, bytes per second."""
    down_bytes_s: float | None
    """Download limit, bytes per second."""
    month_up_bytes: int
    """Bytes sent this month."""
    month_down_bytes: int
    """Bytes received this month."""
    month_quota_bytes: int | None
    """Most bytes, sent and received, in one month."""
    month_ends: str
    """ISO date on which the next month begins."""
    stopped: str
    """Reason why large transfers are suspended; empty while they are not."""
