"""Other forms of a contribution: the record of what the worker trained, and what it folds of a record."""

from pathlib import Path

import msgspec

from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger import records
from atoll.protocols.local.worker_messages import Member, Pending


def member_of(entry: Digest, author: PeerId, weight: int, record: records.Contribution, path: Path) -> Member:
    """Return a contribution as the worker's fold reads it, with its payload at `path`."""
    return Member(
        entry=entry,
        author=author,
        weight=weight,
        payload=record.payload,
        path=str(path),
        experts=records.experts_of(record),
    )


def contribution_of(
    pending: Pending, verdicts: tuple[records.Verdict, ...] | None = None, *, tells_loss: bool = True
) -> records.Contribution:
    """Return the record that announces a payload of this node's worker; `verdicts`: None without audits.

    Without `tells_loss` its loss is 0: that of the member's own sequences has no noise.
    """
    # No run has two of these: reduced rounds, shared experts, audits.
    common = records.Contribution(
        round=pending.round,
        base=pending.base,
        payload=pending.payload,
        steps=pending.steps,
        tokens=pending.tokens,
        weight=pending.weight,
        loss=pending.loss if tells_loss else 0.0,
    )
    fields = msgspec.structs.asdict(common)
    if verdicts is not None:
        return records.AuditedContribution(**fields, verdicts=verdicts)
    if pending.experts:
        return records.PartContribution(**fields, experts=pending.experts)
    return records.SlicedContribution(**fields, rows=Digest(pending.rows)) if pending.rows else common
