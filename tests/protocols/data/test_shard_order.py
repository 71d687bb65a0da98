"""Who reads which windows of a packed text: nobody twice in a pass, everybody few shards, auditors the same."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.runs.presets import preset
from atoll.protocols.data.shard_index import ShardIndex
from atoll.protocols.data.shard_order import Turn, most_windows, shards_of, stretches, windows_a_shard
from atoll.protocols.ids import PeerId, digest
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.worker.session_home import ME, OTHER

TINY = preset("tiny", ME, 7)
SPEC = replace(
    TINY, model=replace(TINY.model, context=10), outer=replace(TINY.outer, stages=(Stage(0, 3), Stage(4, 5)))
)
SPEC = replace(SPEC, inner=replace(SPEC.inner, batch=2), pace=replace(SPEC.pace, most_256=512))
AUDITED = replace(SPEC, audit=AuditSpec())


def index_of(count, per):
    return ShardIndex(
        vocab=256,
        shard_tokens=10 * per + 1,
        shards=b"".join(digest(at.to_bytes(4, "little")) for at in range(count)),
        held_out=bytes(32),
        held_out_tokens=300,
    )


def read(spec, index, turn, count):
    """Shard and window in it of each window of a turn."""
    return [
        (each.shard, each.first + at) for each in stretches(spec, index, turn, count) for at in range(each.windows)
    ]


def nominal(spec, number):
    return spec.steps(number) * spec.inner.batch


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 30), st.integers(1, 5), st.booleans(), st.data())
def test_a_turn_reads_windows_that_are_there_from_its_shards(count, per, number, slots, audited, data):
    spec, index = AUDITED if audited else SPEC, index_of(count, per)
    turn = Turn(number, OTHER, data.draw(st.integers(0, slots - 1)), slots)
    most = most_windows(spec, number)
    found = read(spec, index, turn, most)
    assert len(found) == most == 2 * nominal(spec, number)
    assert all(0 <= shard < count and 0 <= at < per for shard, at in found)
    assert {shard for shard, _ in found} == set(shards_of(spec, index, turn))
    some = data.draw(st.integers(0, most))
    assert read(spec, index, turn, some) == found[:some]


@pytest.mark.parametrize(("count", "per", "slots"), [(12, 20, 3), (4, 60, 4), (1, 90, 3), (2, 40, 5)])
def test_no_window_is_read_twice_in_a_pass_and_nearly_all_are_read(count, per, slots):
    index, seen = index_of(count, per), Counter()
    parts = -(-slots // count)
    units = count * parts
    whole = units // slots * (per // parts)  # windows of each member in the units of one pass that all members get
    for slot in range(slots):
        done, number = 0, 0
        while done < whole:
            taken = min(nominal(SPEC, number), whole - done)
            seen.update(read(SPEC, index, Turn(number, OTHER, slot, slots), taken))
            done, number = done + taken, number + 1
    assert set(seen.values()) == {1}
    assert len(seen) == slots * whole
    assert len(seen) >= count * per * (1 - slots / units)


def test_each_pass_has_another_order():
    index = index_of(8, 6)
    orders = [tuple(shards_of(SPEC, index, Turn(number, OTHER))) for number in range(40)]
    assert len(set(orders)) > 8


def test_a_member_stays_with_a_shard_until_it_is_read():
    index = index_of(50, 600)
    for spec in (SPEC, AUDITED):
        shards = [shard for number in range(60) for shard in shards_of(spec, index, Turn(number, OTHER, 0, 3))]
        read_windows = sum(nominal(spec, number) for number in range(60))
        # One more at each end, because the last round may go on into the next shard.
        assert len(set(shards)) <= read_windows // 600 + 2


def test_an_auditor_draws_what_the_author_read_whatever_the_slots():
    index = index_of(20, 50)
    for number in range(20):
        own = read(AUDITED, index, Turn(number, OTHER, 3, 7), 12)
        assert own == read(AUDITED, index, Turn(number, OTHER), 12)
        assert own != read(AUDITED, index, Turn(number, ME), 12)


def test_windows_follow_each_other():
    found = read(SPEC, index_of(3, 500), Turn(0, PeerId(OTHER)), 6)
    assert [at for _, at in found] == list(range(6))
    assert windows_a_shard(index_of(3, 500), 10) == 500
    assert windows_a_shard(replace(index_of(1, 1), shard_tokens=10), 10) == 0


def test_an_audited_turn_longer_than_a_shard_reads_several_and_no_window_of_one_twice():
    index = index_of(40, 3)
    for number in range(20):
        found = read(AUDITED, index, Turn(number, OTHER), 9)
        for whole in range(3):
            part = found[3 * whole : 3 * whole + 3]
            assert len({shard for shard, _ in part}) == 1
            assert {at for _, at in part} == {0, 1, 2}
    shards = [shards_of(AUDITED, index, Turn(number, OTHER)) for number in range(20)]
    assert max(map(len, shards)) >= 4, "each is drawn anew"
