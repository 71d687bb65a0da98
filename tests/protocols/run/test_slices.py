"""Who reduces what: even, sticky, and the same for everybody."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocols.codec import check_types
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest
from atoll.protocols.ledger.records import MAX_SET
from atoll.protocols.run.slices import MAX_REDUCERS, ReduceSpec, all_gather, even_count, plan_of, slice_count

RUN = RunId(digest(b"run"))
PEERS = [Identity(digest(number.to_bytes(2, "little"))).peer_id for number in range(130)]
SPEC = ReduceSpec()


def plan(count, chunks=1000, absent=(), run=RUN, spec=SPEC):
    return plan_of(run, frozenset(PEERS[:count]), frozenset(absent), chunks, spec)


@settings(max_examples=60, deadline=None)
@given(st.integers(17, 130), st.integers(17, 5000))
def test_slices_are_even_and_each_has_its_own_reducer(count, chunks):
    made = plan(count, chunks)
    sizes = [span.chunks for span in made.spans]
    assert [span.start for span in made.spans] == [sum(sizes[:at]) for at in range(len(sizes))]
    assert sum(sizes) == chunks
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    assert len(set(made.reducers)) == len(made.reducers) == len(made.spans) <= count
    assert set(made.reducers) <= set(PEERS[:count])
    assert made.authors == tuple(sorted(PEERS[:count]))
    for span, peer in zip(made.spans, made.reducers, strict=True):
        assert made.span_of(peer) == span


@pytest.mark.parametrize("count", [1, 4, 16])
def test_small_rounds_are_not_reduced(count):
    assert plan(count) == all_gather(1000)


def test_a_set_has_places_for_contributions_beside_its_reductions():
    assert slice_count(600, 1000) == slice_count(5000, 1000) == MAX_REDUCERS
    assert len(plan(128).reducers) == slice_count(128, 1000) == 128
    assert 4 * MAX_REDUCERS <= MAX_SET


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_the_number_of_slices_rises_in_steps_of_a_sixteenth(members):
    count = even_count(members)
    assert count <= members < count * 17 / 16 + 1
    assert even_count(count) == count


@pytest.mark.parametrize(("before", "after"), [(64, 67), (67, 65), (103, 101)])
def test_while_the_number_of_slices_stays_most_reducers_keep_their_slice(before, after):
    one, two = plan(before), plan(after)
    assert one.spans == two.spans
    same = sum(a == b for a, b in zip(one.reducers, two.reducers, strict=True))
    assert same >= 0.7 * len(one.reducers)


def test_who_did_not_reduce_the_last_time_is_left_out():
    usual = plan(67)
    gone = usual.reducers[5]
    made = plan(67, absent=[gone])
    assert gone not in made.reducers
    assert made.authors == usual.authors
    assert made.spans == usual.spans


def test_another_run_has_other_reducers():
    assert plan(40).reducers != plan(40, run=RunId(digest(b"another"))).reducers


def test_golden_plan():
    made = plan(20, chunks=100)
    assert [PEERS.index(peer) for peer in made.reducers] == [
        4,
        11,
        16,
        3,
        5,
        2,
        8,
        1,
        19,
        15,
        17,
        12,
        10,
        7,
        13,
        9,
        18,
        0,
        14,
        6,
    ]


@pytest.mark.parametrize("change", [{"above": 0}, {"gap": 0}, {"gap": 65}, {"k": 0}, {"k": 4097}])
def test_illegal_settings_are_named(change):
    with pytest.raises(ConfigError, match=f"reduce.{next(iter(change))} = "):
        check_types(ReduceSpec(**change), "reduce.")
    check_types(ReduceSpec())
