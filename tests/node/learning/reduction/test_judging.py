"""Openings: honest ones are right, every lie that is opened is proven, and forged ones prove nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.learning.reduction.judging import proves_fault
from atoll.node.learning.reduction.packing import packed
from atoll.node.learning.reduction.reducer import Reducer
from atoll.node.learning.reduction.reducing import ReducerErrorFeedback, kept_leaves
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, LocalFault, PeerFault
from atoll.protocols.ids import digest
from atoll.protocols.ledger.reduction import OPENED_CHUNKS, decode_proof, opening_max_bytes, proof_max_bytes
from atoll.protocols.ledger.rows import RowTree, join_rows, silent_row
from atoll.protocols.merkle import levels_of
from atoll.protocols.run.arena import Span
from atoll.protocols.run.payload import Layout
from atoll_bench.topology.topology_peer import sampled_chunks
from tests.plain.mean import PLAIN

torch.set_num_threads(1)
REDUCED_K = 16


def wrong_values(made):
    """The payload of other values."""
    payload = join_rows(silent_row(REDUCED_K) * made.span.chunks, REDUCED_K)
    return made._replace(payload=payload, tree=RowTree(payload, Layout("sparse2", made.span.chunks, REDUCED_K)))


def wrong_remainder(made):
    """An honest payload, and error feedback that is invented: values for the rounds to come."""
    left = made.left.values_C4096 + 5
    return made._replace(left=ReducerErrorFeedback(made.span, left), kept_levels=levels_of(kept_leaves(left)))


LIES = {"values": wrong_values, "remainder": wrong_remainder}


CACHE = {}


def judged(world, claim, offers, chunk, opening=None):
    proof = codec.encode(world.proof(claim, offers, chunk, opening))
    assert len(proof) <= proof_max_bytes(world.rules, len(offers))
    return proves_fault(decode_proof(proof, world.rules), world.rules, PLAIN)


def chunks_of(claim):
    return range(claim.body.span.start, claim.body.span.stop)


def test_three_honest_rounds_are_never_proven_wrong(small):
    world, offers = small.world, small.offers
    for number in range(3):
        claim = world.reduce(2, offers, number)
        assert bool(claim.body.previous) == (number > 0)
        assert not any(judged(world, claim, offers, chunk) for chunk in chunks_of(claim))
        offers = [world.offer(who, number + 1) for who in range(5)]


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("first", [True, False])
def test_a_lie_is_proven_by_each_of_its_chunks_and_by_nobody_elses(small, lie, first):
    world, offers, number = small.world, small.offers, 0
    if not first:
        world.reduce(2, offers, 0)
        offers, number = [world.offer(who, 1) for who in range(5)], 1
    claim = world.reduce(2, offers, number, LIES[lie])
    honest = world.reduce(3, offers, number)
    assert all(judged(world, claim, offers, chunk) for chunk in chunks_of(claim))
    assert not any(judged(world, honest, offers, chunk) for chunk in chunks_of(honest))


def test_error_feedback_that_is_not_what_the_last_round_left_is_no_way_out(small):
    """Who began with other values can show neither them nor the right ones."""
    world = small.world
    world.reduce(2, small.offers)
    offers = [world.offer(who, 1) for who in range(5)]
    reducer = world.reducers[2]
    last = reducer.last
    reducer._last = last._replace(left=ReducerErrorFeedback(last.left.span, last.left.values_C4096 + 9))
    claim = world.reduce(2, offers, 1)
    chunk = claim.body.span.start
    with pytest.raises(DecodeError):
        judged(world, claim, offers, chunk)
    opening = reducer.open(claim.entry, chunk)
    true = tuple(packed(values) for values in last.left.values_C4096)
    assert judged(world, claim, offers, chunk, replace(opening, before=true))


def test_neighbouring_chunks_are_opened_together(world_of):
    """A slice of 13 chunks is two groups, and a lie about one chunk shows in the opening of its own alone."""
    world = world_of(3, 40)
    world.reduce(1, [world.offer(who) for who in range(3)])
    offers = [world.offer(who, 1) for who in range(3)]

    def lie(made):
        left = made.left.values_C4096.clone()
        left[2, 7] += 1
        return made._replace(left=ReducerErrorFeedback(made.span, left), kept_levels=levels_of(kept_leaves(left)))

    claim = world.reduce(1, offers, 1, lie)
    span = claim.body.span
    found = [judged(world, claim, offers, chunk) for chunk in chunks_of(claim)]
    assert found == [True] * OPENED_CHUNKS + [False] * (span.chunks - OPENED_CHUNKS)
    openings = [world.reducers[1].open(claim.entry, chunk) for chunk in (span.start, span.stop - 1)]
    assert [opening.span for opening in openings] == [
        Span(span.start, span.start + OPENED_CHUNKS),
        Span(span.start + OPENED_CHUNKS, span.stop),
    ]
    assert all(len(opening.before) == len(opening.after) == opening.span.chunks for opening in openings)


def test_a_reducer_that_moved_is_opened_over_the_border(small):
    world = small.world
    span = world.plan.span_of(world.peers[2])
    wider = Span(0, span.stop + 1) if span.start == 0 else Span(span.start - 1, span.stop)
    world.reduce(2, small.offers)
    offers = [world.offer(who, 1) for who in range(5)]
    world.plan = replace(world.plan, spans=tuple(wider if each == span else each for each in world.plan.spans))
    claim = world.reduce(2, offers, 1)
    assert not any(judged(world, claim, offers, chunk) for chunk in chunks_of(claim))
    new = world.reducers[2].open(claim.entry, wider.start if span.start else wider.stop - 1)
    assert len(new.before) == span.chunks == wider.chunks - 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_an_opening_that_is_changed_anywhere_proves_nothing(world_of, data):
    """Every part is under a signed root: who frames an honest reducer must break BLAKE3."""
    world = CACHE.setdefault("world", world_of(4))
    if "claim" not in CACHE:
        offers = [world.offer(who) for who in range(4)]
        world.reduce(1, offers)
        CACHE["offers"] = [world.offer(who, 1) for who in range(4)]
        CACHE["claim"] = world.reduce(1, CACHE["offers"], 1)
    claim, offers = CACHE["claim"], CACHE["offers"]
    proof = bytearray(codec.encode(world.proof(claim, offers, claim.body.span.start)))
    at = data.draw(st.integers(0, len(proof) - 1))
    proof[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PeerFault):
        proves_fault(decode_proof(bytes(proof), world.rules), world.rules, PLAIN)


def test_entries_of_something_else_prove_nothing(small):
    world, offers = small.world, small.offers
    claim, other = world.reduce(2, offers), world.reduce(3, offers)
    chunk = claim.body.span.start
    proof = world.proof(claim, offers, chunk)
    later = world.offer(0, 1)
    for change in (
        {"contributions": proof.contributions[:-1]},
        {"contributions": proof.contributions[::-1]},
        {"contributions": (*proof.contributions[1:], codec.encode(world.entries[later.entry]))},
        {"reduction": proof.contributions[0]},
        {"reduction": codec.encode(world.entries[other.entry])},
        {"previous": proof.reduction},
        {"opening": replace(proof.opening, raw=proof.opening.raw[:-1])},
        {"contributions": proof.contributions[:-1], "opening": replace(proof.opening, raw=proof.opening.raw[:-1])},
        {"opening": replace(proof.opening, span=Span(chunk + 1, chunk + 1 + proof.opening.span.chunks))},
        {"opening": replace(proof.opening, span=Span(chunk, chunk + 1), after=proof.opening.after[:1])},
        {"opening": replace(proof.opening, after=())},
        {"opening": replace(proof.opening, before=(b"\0",))},
        {"opening": replace(proof.opening, before_path=bytes(32))},
        {"version": 1},
    ):
        changed = codec.encode(replace(proof, **change))
        with pytest.raises(PeerFault):
            proves_fault(decode_proof(changed, world.rules), world.rules, PLAIN)


def test_covering_an_illegal_row_is_not_a_fault(world_of):
    """It is silent, for the reducer as for everybody who adds it up raw."""
    world = world_of(4)
    good = world.offer(0)
    payload = world.payloads[good.entry]
    layout = Layout("sparse2", world.rules.chunks, world.rules.k)
    broken = payload[: layout.offsets[2]] + b"\xff" * (len(payload) - layout.offsets[2])
    offers = [good, *(world.offer(who) for who in (1, 2)), world.offer(3, payload=broken)]
    claim = world.reduce(1, offers)
    assert not any(judged(world, claim, offers, chunk) for chunk in chunks_of(claim))


def test_openings_stay_within_their_cap(small):
    claim = small.world.reduce(2, small.offers)
    opening = small.world.reducers[2].open(claim.entry, claim.body.span.start)
    assert len(codec.encode(opening)) <= opening_max_bytes(small.world.rules, 5)


def test_a_reducer_opens_its_own_chunks_until_the_round_is_forgotten(small):
    world = small.world
    claim = world.reduce(2, small.offers)
    reducer = world.reducers[2]
    with pytest.raises(LocalFault):
        reducer.open(claim.entry, claim.body.span.stop)
    with pytest.raises(LocalFault):
        reducer.open(digest(b"?"), claim.body.span.start)
    assert reducer.open(claim.entry, claim.body.span.start).raw
    reducer.forget(claim.entry)
    with pytest.raises(LocalFault):
        reducer.open(claim.entry, claim.body.span.start)
    after = world.reduce(2, [world.offer(who, 1) for who in range(5)], 1)
    assert after.body.previous == claim.entry, "the chain goes on"
    assert reducer.open(after.entry, claim.body.span.start).before


class FinalAtSecondLook(bytes):
    """A name of a Reduction whose round becomes final, in another thread, between two looks at what was made."""

    def __init__(self, name):
        self.looks, self.on_second = 0, lambda: None

    def __hash__(self):
        self.looks += 1
        if self.looks == 2:
            self.on_second()
        return super().__hash__()


def test_an_opening_while_its_round_becomes_final_is_given_or_refused(small):
    world, reducer = small.world, small.world.reducers[2]
    claim = world.reduce(2, small.offers)
    name = FinalAtSecondLook(claim.entry)
    name.on_second = lambda: reducer.forget(claim.entry)
    assert reducer.open(name, claim.body.span.start) == reducer.open(claim.entry, claim.body.span.start)
    reducer.forget(claim.entry)
    with pytest.raises(LocalFault):
        reducer.open(claim.entry, claim.body.span.start)


def test_a_reducer_goes_on_after_a_restart(small):
    world, reducer = small.world, small.world.reducers[2]
    world.reduce(2, small.offers)
    fresh = world.reducers[2] = Reducer(world.rules, PLAIN)
    fresh.restore((reducer.last.name, reducer.last.left))
    offers = [world.offer(who, 1) for who in range(5)]
    claim = world.reduce(2, offers, 1)
    assert claim.body.previous == reducer.last.name
    assert not any(judged(world, claim, offers, chunk) for chunk in chunks_of(claim))


def test_a_missed_round_is_not_owed_and_the_rest_is(small):
    """Its slice was added raw: what it left must not be said again, what came before and after must be."""
    world, reducer = small.world, small.world.reducers[2]
    claims, left = [], []
    for number in range(3):
        offers = [world.offer(who, number) for who in range(5)]
        claims.append(world.reduce(2, offers, number))
        left.append(reducer._made[claims[-1].entry].left.values_C4096.long())
    rest = reducer.start_anew(claims[1].entry)
    assert torch.equal(rest.values_C4096.long(), left[2] - (left[1] - left[0]))
    rest = reducer.start_anew(claims[2].entry)
    assert torch.equal(rest.values_C4096.long(), -(left[2] - left[1])), "what came after was handed back already"
    again = world.reduce(2, [world.offer(who, 3) for who in range(5)], 3)
    assert again.body.previous == b""


@given(st.binary(max_size=8), st.integers(0, 50), st.integers(1, 30), st.integers(1, 40))
def test_samples_are_chunks_of_the_slice(seed, first, chunks, count):
    span = Span(first, first + chunks)
    found = sampled_chunks(seed, span, count)
    assert len(found) == len(set(found)) == min(count, chunks)
    assert all(span.holds(chunk) for chunk in found)
    assert found == sampled_chunks(seed, span, count)


def test_an_opening_of_some_of_its_group_is_refused(world_of, monkeypatch):
    """All in it is under the signed roots, and it leaves out the chunk that is wrong."""
    world = world_of(3, 40)
    offers = [world.offer(who) for who in range(3)]
    claim = world.reduce(1, offers)
    chunk = claim.body.span.start + 1
    with monkeypatch.context() as patched:
        for module in ("reducer", "judging"):
            patched.setattr(f"atoll.node.learning.reduction.{module}.opened_span", lambda _, at: Span(at, at + 1))
        alone = world.reducers[1].open(claim.entry, chunk)
        assert not judged(world, claim, offers, chunk, alone)
    with pytest.raises(DecodeError, match="other chunks"):
        judged(world, claim, offers, chunk, alone)
