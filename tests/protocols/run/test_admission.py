"""Permits: only the owner makes them, only their holder uses them, and replicas judge them alike."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest, peer_id_of
from atoll.protocols.ledger.records import Admit, Leave, Round, decode_entry, encode_entry, sign_entry
from atoll.protocols.run.admission import (
    CLOCK_SKEW_S,
    MAX_LISTED,
    AdmissionSpec,
    Rule,
    Token,
    make_token,
    prove,
    refusal,
    refusal_now,
)
from atoll.protocols.run.run_spec import open_run, sign_run

OWNER, FRIEND, STRANGER, LISTED = (Identity(bytes([number]) * 32) for number in range(4))
RUN = RunId(digest(b"run"))
EXPIRES = 2_000_000_000
TOKEN = make_token(RUN, OWNER, bytes(range(32)), EXPIRES, "friends", 3)


def rule(mode: str, *members: Identity) -> Rule:
    return Rule(RUN, OWNER.peer_id, AdmissionSpec(mode=mode, members=tuple(sorted(m.peer_id for m in members))))


def admit(author: Identity, token: Token = TOKEN) -> Admit:
    return Admit(token.permit, prove(RUN, token, author.peer_id))


def why(mode: str, author: Identity, body: Admit | None = None) -> str:
    permit, proof = (body.permit, body.proof) if body else (None, b"")
    return refusal(rule(mode, LISTED), author.peer_id, permit, proof)


def test_who_needs_no_permit() -> None:
    assert refusal(rule("open"), STRANGER.peer_id, None) == ""
    for mode in ("invite", "allowlist"):
        assert why(mode, OWNER) == ""
        assert why(mode, LISTED) == ""


def test_a_permit_admits_its_holder_where_the_run_is_by_invitation() -> None:
    assert why("invite", FRIEND, admit(FRIEND)) == ""
    assert "has shown no permit" in why("invite", FRIEND)
    assert "is not on the list" in why("allowlist", FRIEND, admit(FRIEND))


def test_a_permit_is_the_owners_for_this_run_and_this_peer() -> None:
    assert "made out for another peer" in why("invite", STRANGER, admit(FRIEND))
    forged = make_token(RUN, STRANGER, bytes(32), EXPIRES)
    assert "not signed by the owner" in why("invite", STRANGER, admit(STRANGER, forged))
    elsewhere = make_token(RunId(digest(b"other")), OWNER, bytes(32), EXPIRES)
    assert "not signed by the owner" in why("invite", FRIEND, admit(FRIEND, elsewhere))
    for change in ({"expires": EXPIRES + 1}, {"name": "foes"}, {"members": 0}, {"key": STRANGER.public_key}):
        changed = Admit(msgspec.structs.replace(TOKEN.permit, **change), admit(FRIEND).proof)
        assert "not signed by the owner" in why("invite", FRIEND, changed)


def test_time_and_number_matter_only_now() -> None:
    permit = TOKEN.permit
    assert refusal_now(permit, EXPIRES + CLOCK_SKEW_S, 2) == ""
    assert refusal_now(permit, EXPIRES + 49 * 3600, 0) == "the permit expired 2 d 1 h ago; ask for a new invite"
    assert "3 of 3 have joined with it" in refusal_now(permit, 0.0, 3)
    assert refusal_now(msgspec.structs.replace(permit, members=0), 0.0, 10**6) == ""


def test_golden_permit_and_admit_entry() -> None:
    assert codec.encode(TOKEN.permit)[:40].hex() == (
        "95c42003a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8ce77359400"
    )
    entry = sign_entry(RUN, FRIEND, 0, b"", admit(FRIEND))
    assert decode_entry(encode_entry(entry), RUN) == entry
    assert entry.body.round == -1, "it concerns no round"
    assert digest(encode_entry(entry)).hex() == GOLDEN_ENTRY


def test_an_admit_opens_a_feed_or_is_illegal() -> None:
    first = sign_entry(RUN, FRIEND, 0, b"", Leave(Round(0)))
    with pytest.raises(DecodeError, match="opens a feed"):
        sign_entry(RUN, FRIEND, 1, first.id, admit(FRIEND))
    opening = sign_entry(RUN, FRIEND, 0, b"", admit(FRIEND))
    second = msgspec.structs.replace(opening, seq=1, previous=first.id)
    with pytest.raises(DecodeError, match="opens a feed"):
        decode_entry(encode_entry(second), RUN)


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"short"}, {"signature": b""}, {"expires": 0}, {"expires": 1 << 60}, {"members": -1},
        {"members": 1 << 20}, {"name": "x" * 33}, {"name": "\x1b[31m"},
    ],
)  # fmt: skip
def test_illegal_permits(change: dict) -> None:
    permit = msgspec.structs.replace(TOKEN.permit, **change)
    with pytest.raises(DecodeError):
        sign_entry(RUN, FRIEND, 0, b"", Admit(permit, bytes(64)))
    with pytest.raises(DecodeError):
        codec.decode(codec.encode(Token(b"short", EXPIRES, "", 0, TOKEN.signature)), Token)


def test_a_proof_has_64_bytes() -> None:
    with pytest.raises(DecodeError):
        sign_entry(RUN, FRIEND, 0, b"", Admit(TOKEN.permit, b""))


def test_a_run_with_the_longest_list_fits_its_file(spec, owner) -> None:
    crowd = tuple(sorted(peer_id_of(number.to_bytes(32, "big")) for number in range(MAX_LISTED)))
    listed = msgspec.structs.replace(spec, admission=AdmissionSpec(mode="allowlist", members=crowd))
    assert open_run(sign_run(listed, owner)) == listed


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_changed_admit_admits_nobody(data) -> None:
    raw = bytearray(encode_entry(sign_entry(RUN, FRIEND, 0, b"", admit(FRIEND))))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises((DecodeError, SignatureFault)):
        decode_entry(bytes(raw), RUN)


GOLDEN_ENTRY = "39c7c018870612bc39531810f62b512b6da99c324ef3c73558937347dd1dac1d"
