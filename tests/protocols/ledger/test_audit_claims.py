"""Registers of audits: their limits."""

import pytest

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest
from atoll.protocols.ledger.audit_claims import MAX_FOUND, AuditCall, AuditFindings
from atoll.protocols.ledger.records import MAX_EXCESS
from atoll.protocols.ledger.registers import REGISTER_MAX_BYTES, decode_register, sign_register

ME, RUN = Identity(bytes([1]) * 32), RunId(digest(b"run"))
FULL = tuple((digest(bytes([number]))[:8], (-1) ** number * MAX_EXCESS) for number in range(MAX_FOUND))


def sent(value):
    return codec.encode(sign_register(RUN, ME, (1 << 48) - 1, (1 << 48) - 1, 60.0, value))


def test_a_full_register_fits():
    data = sent(AuditFindings(FULL))
    assert len(data) <= REGISTER_MAX_BYTES
    assert decode_register(data, RUN).value.found == FULL


def test_a_register_of_too_many_findings_is_refused():
    data = sent(AuditFindings((*FULL, (bytes(8), 0))))
    assert len(data) <= REGISTER_MAX_BYTES, "its bytes would be legal"
    with pytest.raises(DecodeError):
        decode_register(data, RUN)


@pytest.mark.parametrize("found", [(bytes(7), 0), (bytes(9), 0), (bytes(8), MAX_EXCESS + 1), (bytes(8), -97)])
def test_findings_have_ranges(found):
    with pytest.raises(DecodeError):
        decode_register(sent(AuditFindings((found,))), RUN)


def test_a_seed_has_32_bytes():
    assert decode_register(sent(AuditCall(3, digest(b"seed"))), RUN).value.seed == digest(b"seed")
    with pytest.raises(DecodeError):
        decode_register(sent(AuditCall(3, b"short")), RUN)
