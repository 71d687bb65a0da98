"""Words of the second topology: golden bytes, caps, and which contributions a bitmap means."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, Round, RunId, digest
from atoll.protocols.ledger.records import Reduction
from atoll.protocols.ledger.reduction import (
    ASK_MAX_BYTES,
    FaultProof,
    Offer,
    Opening,
    OpeningAsk,
    ReductionRules,
    RowsAnswer,
    RowsAsk,
    cover,
    covered_by,
    decode_ask,
    decode_proof,
)
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import SlicePlan

A, B = Digest(b"a" * 32), Digest(b"b" * 32)
RULES = ReductionRules(RunId(A), 100, 64, 128, 64)
PEERS = [Identity(digest(bytes([number]))).peer_id for number in range(20)]
OPENING = Opening(Span(7, 8), b"row", A, (b"kept",), B, (A,), B, ((b"r", A), (b"s", b"")))
GOLDEN = {
    RowsAsk(A, Span(3, 7)): "93a4726f7773c420" + A.hex() + "920307",
    OpeningAsk(B, 300): "93a76f70656e696e67c420" + B.hex() + "cd012c",
    RowsAnswer(b"rows", b"path"): "92c404726f7773c40470617468",
    OPENING: (
        "98920708c403726f77c420" + A.hex() + "91c4046b657074c420" + B.hex() + "91c420" + A.hex() + "c420" + B.hex()
        + "9292c40172c420" + A.hex() + "92c40173c400"
    ),
    FaultProof(2, b"e", b"", (b"c",), OPENING): "9502c40165c40091c40163",
}  # fmt: skip


@pytest.mark.parametrize("message", GOLDEN, ids=lambda message: type(message).__name__)
def test_golden_bytes(message):
    data = codec.encode(message)
    assert data.hex().startswith(GOLDEN[message])
    assert codec.decode(data, type(message)) == message


def test_questions_are_small_and_of_two_kinds():
    for ask in (RowsAsk(A, Span(2**32 - 2, 2**32 - 1)), OpeningAsk(B, 2**32 - 1)):
        assert len(codec.encode(ask)) <= ASK_MAX_BYTES
        assert decode_ask(codec.encode(ask)) == ask
    for data in (b"", codec.encode(["blob", A]), codec.encode(["rows", A]), bytes(ASK_MAX_BYTES + 1)):
        with pytest.raises(DecodeError):
            decode_ask(data)
    for far in (RowsAsk(A, Span(0, 2**32)), RowsAsk(A, Span(-1, 3)), OpeningAsk(B, 2**32), OpeningAsk(B, -1)):
        with pytest.raises(DecodeError):
            decode_ask(codec.encode(far))


def test_a_proof_of_another_version_is_refused():
    with pytest.raises(DecodeError, match="version 1"):
        decode_proof(codec.encode(FaultProof(1, b"", b"", (), OPENING)), RULES)


@settings(deadline=None)
@given(st.sets(st.integers(0, 19)), st.integers(0, 19), st.data())
def test_what_is_covered_is_found_again_among_all(chosen, known, data):
    plan = SlicePlan(tuple(sorted(PEERS[:known])), (), ())
    offers = [Offer(digest(b"entry", bytes([number])), peer, 64, 0) for number, peer in enumerate(PEERS)]
    covered = [offers[number] for number in chosen]
    bits, more, members = cover(covered, plan)
    body = Reduction(Round(0), Span(0, 1), bits, more, members, A, A, A, b"")
    assert covered_by(body, plan, data.draw(st.permutations(offers))) == tuple(sorted(covered))
    if covered:
        lost = data.draw(st.sampled_from(covered))
        assert covered_by(body, plan, [offer for offer in offers if offer != lost]) is None
        other = [offer._replace(entry=digest(offer.entry)) if offer == lost else offer for offer in offers]
        assert covered_by(body, plan, other) is None
