"""Feed entries: signed, linked, canonical; every number within its bounds."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, RunId
from atoll.protocols.ledger.records import (
    FEED_VERSION,
    MAX_REASON,
    MAX_SET,
    Ack,
    AuditedContribution,
    Ballot,
    Contribution,
    Entry,
    Epoch,
    Excise,
    Excised,
    ExcisingProposal,
    Exclude,
    ExcludingProposal,
    Follow,
    Leave,
    PartContribution,
    Prepare,
    Promise,
    Proposal,
    Reduction,
    ReductionFault,
    SlicedContribution,
    SummaryProposal,
    Unanswered,
    Verdict,
    Vote,
    decode_entry,
    encode_entry,
    experts_of,
    set_digest,
    sign_entry,
    unsigned,
)
from atoll.protocols.local import control_messages
from atoll.protocols.run.arena import Span

AUTHOR = Identity(bytes(range(32)))
OTHER = Identity(bytes(range(32, 64)))
RUN = RunId(b"r" * 32)
A, B = Digest(b"a" * 32), Digest(b"b" * 32)
BALLOT = Ballot(3, AUTHOR.peer_id)
WORK = Contribution(round=4, base=A, payload=B, steps=5, tokens=4096, weight=64, loss=2.5)
SLICED = SlicedContribution(4, A, B, 5, 4096, 64, 2.5, rows=A)
PART = PartContribution(4, A, B, 5, 4096, 64, 2.5, experts=b"\x06")
AUDITED = AuditedContribution(4, A, B, 5, 4096, 64, 2.5, verdicts=(Verdict(A, 96), Verdict(B, -96)))
REDUCED = Reduction(4, Span(256, 272), b"\x05", (A, B), A, B, A, B, previous=b"")
EXCISING = ExcisingProposal(4, Ballot(0, AUTHOR.peer_id), (A,), B, (Excised(OTHER.peer_id, 3),))
EXCLUDING = ExcludingProposal(4, Ballot(0, AUTHOR.peer_id), (A,), B, (OTHER.peer_id,))
SUMMARY = SummaryProposal(8, Ballot(0, AUTHOR.peer_id), (A, B), B, A)
BODIES = [
    WORK, Ack(4, A, B), Proposal(4, BALLOT, (A, B), A), Vote(4, BALLOT, A), Prepare(4, BALLOT),
    Promise(4, BALLOT, ()), Promise(4, BALLOT, (A,)), Leave(9),
    Epoch(9, b"", (AUTHOR.peer_id,)), Epoch(9, A, tuple(sorted((AUTHOR.peer_id, OTHER.peer_id)))),
    Follow(9, b""), Follow(9, A), Vote(4, Ballot(3, AUTHOR.peer_id, A), A),
    SLICED, PART, AUDITED, REDUCED, replace(REDUCED, previous=A), ReductionFault(4, A, B), Unanswered(4, A, 7),
    Exclude(9, OTHER.peer_id, ""), Exclude(9, OTHER.peer_id, "r" * MAX_REASON),
    Excise(9, OTHER.peer_id, "", 9), EXCISING, EXCLUDING, SUMMARY,
]  # fmt: skip


def forged(body, **changes):
    """An entry that is signed but was never checked."""
    draft = replace(Entry(FEED_VERSION, RUN, AUTHOR.peer_id, 0, b"", body, b""), **changes)
    return encode_entry(replace(draft, signature=AUTHOR.sign("feed/3", unsigned(draft))))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("seq", "previous"), [(0, b""), (7, A)])
def test_round_trip(body, seq, previous):
    entry = sign_entry(RUN, AUTHOR, seq, previous, body)
    again = decode_entry(encode_entry(entry), RUN)
    assert again == entry
    assert again.id == entry.id


def test_golden_entry():
    entry = sign_entry(RUN, AUTHOR, 7, A, WORK)
    assert entry.id.hex() == "a28786100914a86ea74604e72da5297e87c493d9c06f0eadd799584a14350743"
    assert len(encode_entry(entry)) == 288


@pytest.mark.parametrize(
    ("body", "size", "name"),
    [
        (SLICED, 316, "94309df2b528db0d314acfa52eda7caf044227ae46c51cafd8b2b90ba350f581"),
        (REDUCED, 420, "2d91184d3895c0ff53ab8fbb4d3abfffc081bd1fb053b48e5c64cf97f80b35c6"),
        (ReductionFault(4, A, B), 267, "2a1f9aff4bab5afd4ac53353df4dc0c32b83180e2ba661fc6dda130b51a454a5"),
        (Unanswered(4, A, 7), 239, "0455ba610b479dd3ead0599879d8115a556c14cd8c581c3f72ab44f521392601"),
    ],
)
def test_golden_entries_of_reduced_rounds(body, size, name):
    entry = sign_entry(RUN, AUTHOR, 7, A, body)
    assert (len(encode_entry(entry)), entry.id.hex()) == (size, name)


def test_a_sliced_contribution_is_a_contribution_with_a_root():
    assert isinstance(SLICED, Contribution)
    assert SLICED != WORK
    assert codec.encode(SLICED) == codec.encode(["sliced", 4, A, B, 5, 4096, 64, 2.5, A])


def test_a_contribution_of_some_experts_says_which_and_one_of_all_has_the_bytes_that_it_had():
    assert isinstance(PART, Contribution)
    assert codec.encode(PART) == codec.encode(["part", 4, A, B, 5, 4096, 64, 2.5, b"\x06"])
    assert (experts_of(PART), experts_of(WORK), experts_of(SLICED)) == (b"\x06", b"", b"")


@pytest.mark.parametrize("experts", [b"", bytes(513)])
def test_a_contribution_of_some_experts_without_a_bitmap_is_refused(experts):
    with pytest.raises(DecodeError):
        decode_entry(forged(replace(PART, experts=experts)), RUN)


def test_the_name_does_not_depend_on_the_signature():
    entry = sign_entry(RUN, AUTHOR, 7, A, WORK)
    assert replace(entry, signature=bytes(64)).id == entry.id


@pytest.mark.parametrize(
    "body",
    [
        *(replace(WORK, **{key: value}) for key, values in {
            "round": (-1, 1 << 24, 2**64 - 1), "weight": (0, -1, 256), "steps": (0, -5, 1 << 20),
            "tokens": (0, -1, 1 << 48), "loss": (-1.0, math.nan, math.inf, -math.inf, 1e6),
            "base": (b"", b"a" * 31, b"a" * 33), "payload": (b"",),
        }.items() for value in values),
        Ack(-1, A, B), Ack(1, A, b""), Ack(1, b"", B),
        Proposal(1, BALLOT, (), A), Proposal(1, BALLOT, (B, A), A), Proposal(1, BALLOT, (A, A), A),
        Proposal(1, BALLOT, (A, b"short"), A), Proposal(1, replace(BALLOT, attempt=-1), (A,), A),
        Proposal(1, BALLOT, tuple(sorted(bytes([i // 256, i % 256]) + bytes(30) for i in range(MAX_SET + 1))), A),
        Vote(1, BALLOT, b""), Vote(1, Ballot(1 << 20, AUTHOR.peer_id), A), Vote(1, Ballot(0, "somebody"), A),
        Prepare(1, Ballot(0, "")), Promise(1, BALLOT, (A, B)), Promise(1, BALLOT, (b"",)), Leave(1 << 24),
        Epoch(-1, b"", (AUTHOR.peer_id,)), Epoch(1, b"a", (AUTHOR.peer_id,)), Epoch(1, b"", ()),
        Epoch(1, b"", ("somebody",)), Epoch(1, b"", (AUTHOR.peer_id,) * 2), Follow(1, b"a"), Follow(-1, b""),
        Epoch(1, b"", tuple(sorted((AUTHOR.peer_id, OTHER.peer_id), reverse=True))), Follow(1, A + A),
        Epoch(1, b"", tuple(sorted(str(i) for i in range(MAX_SET + 1)))),
        Vote(1, Ballot(0, AUTHOR.peer_id, b"a"), A),
        Exclude(-1, OTHER.peer_id, ""), Exclude(1, "somebody", ""), Exclude(1, OTHER.peer_id, "\n"),
        Exclude(1, OTHER.peer_id, "r" * (MAX_REASON + 1)), Excise(1, OTHER.peer_id, "", 2),
        Excise(1, "somebody", "", 1), Excise(1, OTHER.peer_id, "", -1), replace(EXCISING, excised=()),
        replace(EXCISING, excised=(Excised(OTHER.peer_id, 4),)), replace(EXCISING, excised=(Excised("me", 3),)),
        replace(EXCISING, excised=(Excised(OTHER.peer_id, 3),) * 2), replace(SUMMARY, summary=b""),
        replace(SUMMARY, contributions=(B, A)), replace(SUMMARY, summary=b"a" * 33),
        replace(EXCISING, excised=tuple(Excised(str(i).zfill(2), 3) for i in range(17))),
        replace(EXCLUDING, excluded=()), replace(EXCLUDING, excluded=(OTHER.peer_id,) * 2),
        replace(EXCLUDING, excluded=("me",)), replace(EXCLUDING, contributions=(B, A)),
        replace(EXCLUDING, excluded=tuple(sorted(Identity(bytes([i]) * 32).peer_id for i in range(17)))),
        replace(AUDITED, verdicts=(Verdict(A, 97),)), replace(AUDITED, verdicts=(Verdict(A, -97),)),
        replace(AUDITED, verdicts=(Verdict(b"", 1),)), replace(AUDITED, verdicts=(Verdict(A, 1),) * 5),
        replace(SLICED, rows=b""), replace(SLICED, weight=0), ReductionFault(4, A, b""), ReductionFault(-1, A, B),
        Unanswered(-1, A, 7), Unanswered(4, b"", 7), Unanswered(4, A, -1), Unanswered(4, A, 1 << 32),
        *(replace(REDUCED, **{key: value}) for key, values in {
            "round": (-1,), "span": (Span(-1, 3), Span(0, 0), Span(9, 8), Span(0, 1 << 32)),
            "more": ((B, A), (A, A), (b"",)), "members": (b"",), "payload": (b"a",), "rows": (b"",),
            "kept": (b"",), "previous": (b"a",), "covered": (bytes(MAX_SET // 8 + 1), b"\xff" * (MAX_SET // 8)),
        }.items() for value in values), replace(REDUCED, covered=b"", more=()),
    ],
)  # fmt: skip
def test_illegal_bodies_are_refused(body):
    with pytest.raises(DecodeError):
        decode_entry(forged(body), RUN)
    with pytest.raises(DecodeError):
        sign_entry(RUN, AUTHOR, 0, b"", body)


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": 3},
        {"version": 5},
        {"seq": -1},
        {"seq": 1},
        {"seq": 1 << 40, "previous": A},
        {"previous": A},
        {"author": "nobody"},
    ],
)
def test_illegal_envelopes_are_refused(changes):
    with pytest.raises(DecodeError):
        decode_entry(forged(WORK, **changes), RUN)


def test_another_run_and_another_author_are_refused():
    data = encode_entry(sign_entry(RUN, AUTHOR, 0, b"", WORK))
    with pytest.raises(SignatureFault):
        decode_entry(data, RunId(b"x" * 32))
    with pytest.raises(SignatureFault):
        decode_entry(forged(WORK, author=Identity(bytes(32)).peer_id), RUN)


def test_the_largest_set_fits_one_entry():
    names = tuple(sorted(Digest(bytes([i // 256, i % 256]) + bytes(30)) for i in range(MAX_SET)))
    entry = sign_entry(RUN, AUTHOR, 0, b"", Proposal(1, BALLOT, names, A))
    assert decode_entry(encode_entry(entry), RUN) == entry


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(BODIES), st.data())
def test_mutations_raise_peer_faults_only(body, data):
    whole = encode_entry(sign_entry(RUN, AUTHOR, 7, A, body))
    raw = bytearray(whole)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PeerFault):
        decode_entry(bytes(raw), RUN)
    with pytest.raises(PeerFault):
        decode_entry(whole[: data.draw(st.integers(0, len(whole) - 1))], RUN)


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=6), st.randoms())
def test_a_set_has_no_order_and_no_duplicates(names, random):
    shuffled = names + names[:2]
    random.shuffle(shuffled)
    assert set_digest(names) == set_digest(shuffled)
    assert set_digest(names) != set_digest([*names, b"?" * 32]) or b"?" * 32 in names


def test_a_tuple_entry_of_the_wrong_arity_is_refused():
    with pytest.raises(DecodeError):
        decode_entry(codec.encode((1, RUN)), RUN)


def test_the_operator_may_give_as_long_a_reason_as_a_record_holds():
    assert control_messages.MAX_REASON == MAX_REASON
