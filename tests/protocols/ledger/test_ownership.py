"""Who trains which experts: whole, even, within room, and stable; bitmaps have one form."""

import random

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.node.runs.presets import preset
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import RunId, digest, peer_id_of
from atoll.protocols.ledger.ownership import Announced, assigned, shares, shortage
from atoll.protocols.run.experts import ALL, bitmap_of, check_bitmap, experts_in

RUN = RunId(digest(b"run"))
PEERS = [peer_id_of(bytes([n + 1]) * 32) for n in range(9)]
COUNTS, HOLDERS = st.integers(1, 20), st.integers(1, 10)


def fresh(peers, room=1 << 10):
    return {peer: Announced(frozenset(), room) for peer in peers}


def again(found, room=1 << 10):
    return {peer: Announced(experts, room) for peer, experts in found.items()}


def holders(found, expert):
    return {peer for peer, experts in found.items() if expert in experts}


ANNOUNCED = st.builds(Announced, st.frozensets(st.integers(0, 19)), st.integers(0, 24))
MEMBERS = st.dictionaries(st.sampled_from(PEERS), ANNOUNCED, min_size=1)


@given(COUNTS, HOLDERS, MEMBERS)
def test_every_expert_has_its_holders_and_nobody_more_than_its_room(count, many, members):
    found = assigned(RUN, count, many, members)
    wanted = min(many, len(members))
    caps = shares(count * wanted, {peer: min(count, one.room) for peer, one in members.items()}, sorted(members))
    assert sum(caps.values()) == min(count * wanted, sum(min(count, one.room) for one in members.values()))
    assert set(found) == set(members)
    assert all(len(experts) <= members[peer].room for peer, experts in found.items())
    assert sorted(map(len, found.values())) == sorted(caps.values())
    numbers = [len(holders(found, expert)) for expert in range(count)]
    assert max(numbers) <= wanted
    if shortage(count, many, [one.room for one in members.values()]):
        assert sum(numbers) == sum(caps.values()) < count * wanted
    else:
        assert min(numbers) == wanted


@pytest.mark.parametrize("cover_first", [False, True])
@given(count=COUNTS, many=HOLDERS, members=MEMBERS)
def test_said_and_computed_again_nothing_changes(cover_first, count, many, members):
    found = assigned(RUN, count, many, members, cover_first=cover_first)
    said = {peer: Announced(experts, members[peer].room) for peer, experts in found.items()}
    assert assigned(RUN, count, many, said, cover_first=cover_first) == found


@given(COUNTS, HOLDERS, MEMBERS)
def test_none_is_without_a_holder_where_there_is_room_for_one_each(count, many, members):
    found = assigned(RUN, count, many, members, cover_first=True)
    room = sum(min(count, one.room) for one in members.values())
    assert len(frozenset().union(*found.values())) == min(count, room)
    plain = assigned(RUN, count, many, members)
    assert sorted(map(len, found.values())) == sorted(map(len, plain.values()))


@given(COUNTS, HOLDERS, MEMBERS, st.randoms())
def test_the_order_in_which_members_were_heard_does_not_matter(count, many, members, luck):
    order = list(members)
    luck.shuffle(order)
    assert assigned(RUN, count, many, {peer: members[peer] for peer in order}) == assigned(
        RUN, count, many, members
    )


CROWD = [peer_id_of(n.to_bytes(2, "big") * 16) for n in range(1, 61)]


def drawn(seed):
    """Members that announce anything, many or few, with much room or little."""
    luck = random.Random(seed)
    count, many = luck.randint(1, 40), luck.randint(1, 6)
    peers = luck.sample(CROWD, luck.randint(1, luck.choice((5, 60))))
    most = luck.choice((2, count, 1024))
    some = {peer: frozenset(luck.sample(range(count), luck.randint(0, min(count, 6)))) for peer in peers}
    return count, many, {peer: Announced(some[peer], luck.randint(0, most)) for peer in peers}


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (0, "59424d4fc2f5ea706f78116febe359aa8d6a4cc3af054f2384dc39c8b34dfe0d"),
        (200, "db9ee09ce879a1b9ac8f08701a1ee9294fe166372862bcd7e3f8118adc9978f1"),
        (400, "3c384cb212b311e59b6b31b6829f304756234e7f73b13da57e8e38553514af7b"),
    ],
)
def test_shares_are_what_they_always_were(first, words):
    """Members of different versions must not disagree: 600 results of the first implementation, hashed."""
    found = [assigned(RUN, *drawn(seed)) for seed in range(first, first + 200)]
    said = [repr(sorted((peer, sorted(experts)) for peer, experts in one.items())).encode() for one in found]
    assert digest(*said).hex() == words


@given(COUNTS, st.integers(2, 9), st.integers(0, 8))
def test_when_one_leaves_only_its_experts_move(count, size, gone):
    assume(gone < size)
    before = assigned(RUN, count, 1, fresh(PEERS[:size]))
    stay = {peer: experts for peer, experts in before.items() if peer != PEERS[gone]}
    after = assigned(RUN, count, 1, again(stay))
    assert all(experts <= after[peer] for peer, experts in stay.items())
    assert sum(len(after[peer] - stay[peer]) for peer in stay) == len(before[PEERS[gone]])


@pytest.mark.parametrize("count", [8, 16, 64])
@pytest.mark.parametrize("many", [2, 3])
def test_with_more_holders_a_few_others_make_room(count, many):
    """With fewer experts than members have places, more may move: then there is little to move."""
    for size in range(many + 1, 10):
        before = assigned(RUN, count, many, fresh(PEERS[:size]))
        for leaver in PEERS[:size]:
            stay = {peer: experts for peer, experts in before.items() if peer != leaver}
            after = assigned(RUN, count, many, again(stay))
            assert sum(len(stay[peer] - after[peer]) for peer in stay) < len(before[leaver])


@given(COUNTS, st.integers(1, 8))
def test_when_one_comes_experts_move_to_it_alone(count, size):
    before = assigned(RUN, count, 1, fresh(PEERS[:size]))
    after = assigned(RUN, count, 1, {**again(before), PEERS[8]: Announced(frozenset(), count)})
    assert all(after[peer] <= experts for peer, experts in before.items())
    assert max(map(len, after.values())) - min(map(len, after.values())) <= 1


@given(COUNTS, st.integers(1, 9))
def test_shares_are_even(count, size):
    found = assigned(RUN, count, 1, fresh(PEERS[:size]))
    assert {len(experts) for experts in found.values()} <= {count // size, -(-count // size)}


def test_as_many_holders_as_members_is_everybody_trains_all():
    found = assigned(RUN, 8, 4, fresh(PEERS[:4]))
    assert set(found.values()) == {frozenset(range(8))}


def test_a_member_with_little_room_leaves_the_rest_to_the_others():
    members = {**fresh(PEERS[:2], 8), PEERS[2]: Announced(frozenset(), 1)}
    sizes = {peer: len(experts) for peer, experts in assigned(RUN, 8, 1, members).items()}
    assert sizes[PEERS[2]] == 1
    assert sum(sizes.values()) == 8
    assert sorted(sizes.values()) == [1, 3, 4]


def test_members_without_room_for_the_model_are_told_in_one_line():
    assert shortage(8, 1, [3, 3]) == "they have room for 6 experts; 8 with 1 holders each need 8"
    assert not shortage(8, 2, [8]), "two holders of one member are one"


@given(st.integers(1, 40), st.data())
def test_a_set_of_experts_has_one_bitmap(count, data):
    experts = data.draw(st.frozensets(st.integers(0, count - 1)))
    found = bitmap_of(experts, count)
    check_bitmap(found, count)
    assert experts_in(found, count) == experts
    assert (found == ALL) == (len(experts) == count)


@pytest.mark.parametrize("bad", [b"\xff", b"\x01\x00", b"\x01\x00\x00"])
def test_other_bitmaps_are_refused(bad):
    with pytest.raises(DecodeError):
        check_bitmap(bad, 8)


def test_no_expert_can_be_named_where_there_are_none():
    check_bitmap(ALL, 0)
    with pytest.raises(DecodeError):
        check_bitmap(b"\x00", 0)


def test_a_preset_may_be_split():
    spec = preset("moe-smoke", PEERS[0], 1)
    msgspec.structs.replace(spec, outer=msgspec.structs.replace(spec.outer, holders=1)).check()
