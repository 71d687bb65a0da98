"""What a trainer and an evaluator say about an audit that the evaluator makes for the trainer (docs/roles.md).

The trainer draws a seed after the round is final, and publishes it. From it follow the windows of each audit that
fell to it, so its own audit and the evaluator's are one measurement, which the trainer may repeat.
"""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols.ids import Digest, RecordRound, digest
from atoll.protocols.ledger.records import MAX_EXCESS

KEY_BYTES = 8
MAX_FOUND = 192
"""Most findings of one register: those of 48 members with four audits each; the oldest make way."""
AuditKey: TypeAlias = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Excess: TypeAlias = Annotated[int, Meta(ge=-MAX_EXCESS, le=MAX_EXCESS)]


class AuditCall(msgspec.Struct, frozen=True, array_like=True, tag="audit_call", forbid_unknown_fields=True):
    """`author` has audits of a final round to make, and evaluators may measure them."""

    round: RecordRound
    seed: Digest
    """32 random bytes, drawn when the round was final: no audited author and no evaluator chooses windows."""


class AuditFindings(
    msgspec.Struct, frozen=True, array_like=True, tag="audit_findings", forbid_unknown_fields=True
):
    """What `author`, an evaluator, found in audits of others, the newest last. Claims, not proofs."""

    found: Annotated[tuple[tuple[AuditKey, Excess], ...], Meta(max_length=MAX_FOUND)]
    """Each audit by `audit_key`, with its excess (`Verdict`); measured at Θ_final after the audited round."""


def audit_key(seed: Digest, entry: Digest) -> bytes:
    """The name of one audit: that of this contribution, by whoever drew the seed."""
    return digest(b"atoll/audit-key/1\0", seed, entry)[:KEY_BYTES]


def audit_seed(seed: Digest, entry: Digest) -> int:
    """The seed of one audit's random numbers, below 2⁶⁴."""
    return int.from_bytes(digest(b"atoll/audit-seed/1\0", seed, entry)[:8], "big")
