"""Registers are a join with an end: laws, echoes, expiry, quotas, epochs."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.membership import register_store
from atoll.p2p.membership.register_store import RegisterStore, next_epoch
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.registers import Addresses, Lease, Register, sign_register

RUN = RunId(digest(b"run"))
ME, *OTHERS = (Identity(bytes([number]) * 32) for number in range(1, 6))


def lease(number: int) -> Lease:
    return Lease("training", Round(number), Round(-1), b"", -1, 1.0)


def signed(author: Identity, epoch: int, seq: int, number: int = 0, ttl_s: float = 10.0) -> bytes:
    return codec.encode(sign_register(RUN, author, epoch, seq, ttl_s, lease(number)))


def registers(**options: int) -> RegisterStore:
    return RegisterStore(RUN, ME, 1, **options)


def test_newer_wins_and_only_newer_is_news() -> None:
    mine = registers()
    assert mine.merge(signed(OTHERS[0], 1, 5, 1), 0.0)
    assert not mine.merge(signed(OTHERS[0], 1, 4, 2), 0.0)
    assert mine.merge(signed(OTHERS[0], 1, 6, 3), 0.0)
    news = mine.merge(signed(OTHERS[0], 2, 0, 4), 0.0)
    assert news, "a restart counts from a higher epoch"
    assert (news.author, news.value) == (OTHERS[0].peer_id, lease(4))
    assert not mine.merge(signed(OTHERS[0], 1, 99, 5), 0.0)
    assert mine.live(Lease, 0.0)[OTHERS[0].peer_id].round == 4
    assert mine.live(Lease, 0.0)[OTHERS[0].peer_id] == lease(4)


def test_an_echo_neither_prolongs_a_life_nor_revives_the_dead() -> None:
    mine = registers()
    data = signed(OTHERS[0], 1, 1)
    assert mine.merge(data, 0.0)
    assert not mine.merge(data, 9.0)
    assert mine.live(Lease, 9.9)
    assert not mine.live(Lease, 10.1)
    assert mine.drop_expired(10.1) == 1
    assert not mine.merge(data, 11.0), "peers that heard it later still echo it"
    assert not mine.live(Lease, 11.0)
    assert mine.merge(signed(OTHERS[0], 1, 2), 12.0), "the author itself may come back"


def test_a_newcomer_grants_only_the_rest_of_a_life() -> None:
    mine, newcomer = registers(), RegisterStore(RUN, OTHERS[3], 1)
    mine.merge(signed(OTHERS[0], 1, 1), 100.0)
    ((age_s, data),) = mine.missing(newcomer.versions(), 104.0, 1 << 20)
    assert age_s == pytest.approx(4.0)
    assert newcomer.merge(data, 0.0, age_s)
    assert newcomer.expires(OTHERS[0].peer_id, Lease, 0.0) == pytest.approx(6.0)
    ((again_s, _),) = newcomer.missing({}, 3.0, 1 << 20)
    assert again_s == pytest.approx(7.0), "ages add up along the way"
    assert not mine.missing(newcomer.versions(), 104.0, 1 << 20), "what is known is not sent"
    assert not mine.missing({}, 111.0, 1 << 20), "the dead are not sent"


def test_missing_is_capped() -> None:
    mine = registers()
    for other in OTHERS:
        mine.merge(signed(other, 1, 1), 0.0)
    assert len(mine.missing({}, 0.0, 1)) == 1
    assert len(mine.missing({}, 0.0, 1 << 20)) == 4


def test_the_cheap_checks_come_first() -> None:
    mine = registers()
    data = signed(OTHERS[0], 1, 1)
    assert mine.merge(data, 0.0)
    broken = data[:-1] + bytes([data[-1] ^ 1])
    older = signed(OTHERS[0], 1, 0)
    assert not mine.merge(older[:-1] + bytes([older[-1] ^ 1]), 0.0), "an old one costs no signature check"
    whole = codec.encode(codec.decode(signed(OTHERS[1], 1, 1), Register))
    forged = whole[:-1] + bytes([whole[-1] ^ 1])
    for illegal, error in ((forged, SignatureFault), (b"\x90", DecodeError), (broken[:50], DecodeError)):
        with pytest.raises(error):
            mine.merge(illegal, 0.0)


def test_authors_are_limited_and_the_dead_make_room() -> None:
    mine = registers(max_authors=2)
    assert mine.merge(signed(OTHERS[0], 1, 1), 0.0)
    assert mine.merge(signed(OTHERS[1], 1, 1), 5.0)
    assert not mine.merge(signed(OTHERS[2], 1, 1), 6.0)
    assert mine.merge(signed(OTHERS[0], 1, 2), 6.0), "who is in stays in"
    assert mine.merge(signed(OTHERS[2], 1, 1), 15.5)
    assert set(mine.live(Lease, 15.5)) == {OTHERS[0].peer_id, OTHERS[2].peer_id}


def test_memory_of_the_dead_is_bounded() -> None:
    mine = registers(max_authors=2)
    for number in range(10, 60):
        mine.merge(signed(Identity(bytes([number]) * 32), 1, 1, ttl_s=0.5), float(number))
        mine.drop_expired(float(number) + 0.6)
    assert len(mine.versions()) <= 16


def test_made_up_authors_that_come_and_go_push_out_no_member() -> None:
    """Each was connected, so it is no stranger; the member's old lease, played again, must stay old."""
    rounds = {OTHERS[0].peer_id: 3}
    mine = RegisterStore(RUN, ME, 1, max_authors=2, rank=lambda peer: rounds.get(peer, 0))
    assert mine.merge(signed(OTHERS[0], 1, 9, ttl_s=0.5), 0.0)
    for number in range(10, 60):
        mine.merge(signed(Identity(bytes([number]) * 32), 1, 1, ttl_s=0.5), float(number))
        mine.drop_expired(float(number) + 0.6)
    assert not mine.merge(signed(OTHERS[0], 1, 3), 70.0)
    assert len(mine.versions()) <= 16


def test_the_leases_that_are_kept_are_those_of_who_worked_most() -> None:
    rounds = {OTHERS[0].peer_id: 3, OTHERS[1].peer_id: 1}
    mine = RegisterStore(RUN, ME, 1, rank=lambda peer: rounds.get(peer, 0))
    for author in OTHERS[:4]:
        assert mine.merge(signed(author, 1, 1), 0.0)
    assert mine.newest_leases() == [signed(author, 1, 1) for author in OTHERS[:4]]
    assert mine.newest_leases(3) == [signed(author, 1, 1) for author in (OTHERS[3], OTHERS[1], OTHERS[0])]


def test_types_do_not_mix_and_our_own_are_live_at_once() -> None:
    mine = registers()
    mine.publish(lease(3), 10.0, 0.0)
    mine.publish(Addresses(("/ip4/1.2.3.4/tcp/5",)), 600.0, 0.0)
    assert mine.live(Lease, 1.0) == {ME.peer_id: lease(3)}
    assert set(mine.live(Addresses, 11.0)) == {ME.peer_id}
    assert mine.live(Lease, 11.0) == {}


def test_a_lost_epoch_counter_is_outrun_by_what_peers_remember() -> None:
    mine = registers()
    mine.publish(lease(1), 10.0, 0.0)
    old_life = signed(ME, 7, 3, 9)
    assert not mine.merge(old_life, 0.0), "our own word is not news to us"
    again = codec.decode(mine.publish(lease(2), 10.0, 1.0), Register)
    assert (again.epoch, again.seq) > (7, 3)
    other = RegisterStore(RUN, OTHERS[0], 1)
    assert other.merge(old_life, 0.0)
    assert other.merge(codec.encode(again), 0.0)


def test_a_start_knows_which_leases_the_one_before_has_seen() -> None:
    before, mine = registers(), registers()
    assert before.merge(signed(OTHERS[0], 3, 7), 0.0)
    assert before.merge(signed(OTHERS[1], 1, 1), 0.0)
    mine.raise_floors([*before.newest_leases(), b"damaged"])
    assert not mine.merge(signed(OTHERS[0], 3, 6), 0.0), "a stranger plays it again"
    assert mine.merge(signed(OTHERS[0], 3, 7), 0.0), "it may be alive still"
    assert not mine.merge(signed(OTHERS[0], 3, 7), 5.0)
    assert mine.merge(signed(OTHERS[0], 3, 8), 6.0)
    assert mine.versions() == {(OTHERS[0].peer_id, "lease"): (3, 8)}, "peers send what this start has not"
    assert {*mine.newest_leases()} == {signed(OTHERS[0], 3, 8), signed(OTHERS[1], 1, 1)}, "and it is kept"


def test_a_start_that_lost_its_count_goes_on_above_its_own_newest_lease() -> None:
    mine = registers()
    mine.raise_floors([signed(ME, 7, 3)])
    again = codec.decode(mine.publish(lease(1), 10.0, 0.0), Register)
    assert (again.epoch, again.seq) == (8, 1)


def test_strangers_are_not_remembered_but_who_was_known_once_is() -> None:
    known: set[str] = {OTHERS[0].peer_id}
    before, mine = (RegisterStore(RUN, ME, 1, is_known=known.__contains__) for _ in range(2))
    for author in OTHERS[:2]:
        assert before.merge(signed(author, 1, 1), 0.0)
    assert before.newest_leases() == [signed(OTHERS[0], 1, 1)]
    known.clear()  # the ledger is not replayed yet
    mine.raise_floors(before.newest_leases() or [signed(OTHERS[0], 1, 1)])
    assert mine.newest_leases() == [signed(OTHERS[0], 1, 1)]


@pytest.mark.parametrize("places", [1, 2])
def test_who_seems_to_be_a_stranger_keeps_what_an_earlier_start_has_seen(monkeypatch, places: int) -> None:
    """It gives way to who is known, or expires; then its old leases are as old as before."""
    monkeypatch.setattr(register_store, "MAX_STRANGERS", 1)
    known: set[str] = {OTHERS[1].peer_id}
    mine = RegisterStore(RUN, ME, 1, max_authors=places, is_known=known.__contains__)
    mine.raise_floors([signed(OTHERS[0], 1, 9)])
    assert mine.merge(signed(OTHERS[0], 1, 9), 0.0)
    assert mine.merge(signed(OTHERS[1], 1, 1), 0.0)
    mine.drop_expired(20.0)
    assert not mine.merge(signed(OTHERS[0], 1, 3), 21.0)
    assert signed(OTHERS[0], 1, 9) in mine.newest_leases()


def test_another_life_of_ours_is_heard_as_long_as_it_speaks() -> None:
    mine = registers()
    for turn, (epoch, seq, echoes) in enumerate(
        [(7, 3, 1), (7, 3, 1), (7, 2, 1), (7, 4, 2), (8, 1, 3), (8, 1, 3)]
    ):
        assert not mine.merge(signed(ME, epoch, seq, 9), float(turn))
        assert mine.echoes == echoes
    own = mine.publish(lease(1), 10.0, 9.0)
    mine.merge(own, 9.0)
    assert mine.echoes == 3, "what this life wrote is no echo"


def test_epochs_rise_with_each_start(tmp_path: Path) -> None:
    path = tmp_path / "epoch"
    assert [next_epoch(path) for _ in range(3)] == [1, 2, 3]
    assert path.read_bytes() == b"3\n"
    path.write_bytes(b"garbage")
    with pytest.raises(CorruptFault):
        next_epoch(path)


_WORDS = [
    signed(author, epoch, seq, number, ttl_s)
    for author in OTHERS[:2]
    for epoch, seq, number, ttl_s in (
        (1, 1, 1, 5.0),
        (1, 1, 2, 9.0),
        (1, 2, 1, 5.0),
        (2, 0, 4, 7.0),
        (2, 1, 1, 3.0),
    )
]


def state(words: list[bytes]) -> object:
    mine = registers()
    for data in words:
        mine.merge(data, 0.0)
    return mine.versions(), mine.live(Lease, 0.0), {a.peer_id: mine.expires(a.peer_id, Lease, 0.0) for a in OTHERS}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(_WORDS), max_size=8), st.randoms(use_true_random=False))
def test_merge_is_commutative_and_idempotent(words: list[bytes], luck: object) -> None:
    shuffled = [*words, *words[: len(words) // 2]]
    luck.shuffle(shuffled)  # type: ignore[attr-defined]
    assert state(words) == state(shuffled)


@settings(max_examples=40, deadline=None)
@given(*[st.lists(st.sampled_from(_WORDS), max_size=4) for _ in range(3)])
def test_merge_is_associative(a: list[bytes], b: list[bytes], c: list[bytes]) -> None:
    def join(first: list[bytes], second: list[bytes]) -> list[bytes]:
        mine = registers()
        for data in (*first, *second):
            mine.merge(data, 0.0)
        return [data for _, data in mine.missing({}, 0.0, 1 << 20)]

    assert sorted(join(join(a, b), c)) == sorted(join(a, join(b, c)))


def test_registers_of_those_who_are_not_admitted_are_kept_once_they_are() -> None:
    admitted: set[str] = set()
    mine = RegisterStore(RUN, ME, 1, admits=admitted.__contains__)
    data = signed(OTHERS[0], 1, 1)
    assert not mine.merge(data, 0.0)
    assert not mine.live(Lease, 0.0)
    assert mine.versions() == {}, "a refusal leaves no trace that could shut out the same register later"
    mine.publish(lease(1), 10.0, 0.0)
    assert mine.live(Lease, 0.0).keys() == {ME.peer_id}, "our own are ours to keep"
    admitted.add(OTHERS[0].peer_id)
    assert mine.merge(data, 1.0)


def test_strangers_give_way_and_leave_no_trace(monkeypatch) -> None:
    """Two places of strangers, three of all: a third stranger waits, who is known does not."""
    monkeypatch.setattr(register_store, "MAX_STRANGERS", 2)
    known = {OTHERS[3].peer_id}
    mine = RegisterStore(RUN, ME, 1, max_authors=3, is_known=lambda peer: peer in known)
    assert not mine.is_pressed
    assert mine.merge(signed(OTHERS[0], 1, 1, ttl_s=5.0), 0.0)
    assert mine.is_pressed
    assert mine.is_stranger(OTHERS[0].peer_id)
    assert mine.merge(signed(OTHERS[1], 1, 1), 0.0)
    assert mine.merge(signed(OTHERS[1], 1, 2, 1), 0.0), "one that is here is renewed"
    assert not mine.merge(signed(OTHERS[2], 1, 1), 0.0)
    mine.publish(lease(0), 10.0, 0.0)
    assert mine.merge(signed(OTHERS[3], 1, 1), 0.0), "the oldest stranger goes"
    assert set(mine.live(Lease, 0.0)) == {ME.peer_id, OTHERS[1].peer_id, OTHERS[3].peer_id}
    assert {author for author, _ in mine.versions()} == set(mine.live(Lease, 0.0)), "with its numbers"
    known.add(OTHERS[1].peer_id)
    assert not mine.is_stranger(OTHERS[1].peer_id)
    assert mine.drop_expired(20.0) == 3
    assert not mine.is_pressed
    assert {author for author, _ in mine.versions()} == set(known) | {ME.peer_id}
