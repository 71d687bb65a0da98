"""Other forms of a contribution: the record of what the worker trained, what it verifies, and what it folds."""

from pathlib import Path
from typing import TypeAlias

import msgspec

from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger import records
from atoll.protocols.ledger.coverage import payload_size
from atoll.protocols.local.worker_messages import Member, Pending, VerifyRequest
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import payload_bytes
from atoll.protocols.run.run_spec import RunSpec

PayloadRecord: TypeAlias = records.Contribution | records.Reduction
"""A ledger record that names a payload. Another record may name the same bytes as something else."""


def legal_size(spec: RunSpec, record: PayloadRecord) -> int:
    """Return the only legal length in bytes of a record's payload, before a byte of it was seen."""
    if isinstance(record, records.Contribution):
        return payload_size(spec, record.round, records.experts_of(record))
    assert spec.reduce is not None, "other runs have no lawful Reductions"
    return payload_bytes("sparse2", record.span.chunks, spec.reduce.k)


def verification_of(path: Path, record: PayloadRecord) -> VerifyRequest:
    """Return the request that verifies the file at `path` against a record."""
    experts = records.experts_of(record) if isinstance(record, records.Contribution) else b""
    return VerifyRequest(str(path), record.round, experts=experts, rows=rows_of(record), reduced=slice_of(record))


def rows_of(record: PayloadRecord) -> bytes:
    """Return the root of the rows of a payload that is reduced by slices; else nothing."""
    return record.rows if isinstance(record, records.SlicedContribution | records.Reduction) else b""


def slice_of(record: PayloadRecord) -> tuple[Span, ...]:
    """Return the slice of a Reduction, as one span; nothing for a contribution."""
    return (record.span,) if isinstance(record, records.Reduction) else ()


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


def age_of(pending: Pending) -> int:
    """Return by how many rounds the base of trained work is older than its round: it began in `round - age`."""
    return pending.form[0] if len(pending.form) == 1 else 0


def contribution_of(
    pending: Pending,
    verdicts: tuple[records.Verdict, ...] | None = None,
    *,
    tells_loss: bool = True,
    is_planned: bool = False,
) -> records.Contribution:
    """Return the record that announces a payload of this node's worker; `verdicts`: None without audits.

    Without `tells_loss` its loss is 0: that of the member's own sequences has no noise. `is_planned`: the round's
    reducers are known here.
    """
    # No run has two of these: reduced rounds, shared experts, audits, work of an old base.
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
    if age := age_of(pending):
        return records.StaleContribution(**fields, age=age)
    if pending.experts:
        return records.PartContribution(**fields, experts=pending.experts)
    sliced = records.PlannedContribution if is_planned else records.SlicedContribution
    return sliced(**fields, rows=Digest(pending.form)) if pending.form else common
