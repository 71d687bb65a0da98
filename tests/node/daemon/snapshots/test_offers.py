"""Offers are sorted by who made them, and each failure counts against them for a while."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.snapshots.offers import (
    FORGET_S,
    LAST_RETRY_S,
    REFUSED_S,
    RETRY_S,
    OfferBook,
    SnapshotOffer,
    Trust,
    trust_by,
)
from atoll.protocols.errors import DecodeError, DiskFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest

ME, RECENT, WORKED, STRANGER, OTHER = (Identity(bytes([n]) * 32).peer_id for n in range(1, 6))
STATES = {n: digest(b"state", bytes([n])) for n in range(20)}
TRUST = trust_by(ME, {RECENT}, lambda peer: peer in (RECENT, WORKED))
GONE = Unreachable("gone")


def blob(number):
    return digest(b"blob", bytes([number]))


def offer(peer, number, name=None):
    return SnapshotOffer(peer, blob(number if name is None else name), Round(number))


def sort(book, offers, now=0.0):
    return book.sort(offers, STATES, TRUST, now)


def test_who_worked_lately_comes_before_newer_rounds_of_strangers():
    offers = [offer(STRANGER, 9), offer(WORKED, 8), offer(RECENT, 5), offer(ME, 4), offer(RECENT, 99)]
    found = sort(OfferBook(), offers)
    assert [(one.trust, one.round) for one in found] == [
        (Trust.OWN, 4),
        (Trust.RECENT, 5),
        (Trust.WORKED, 8),
        (Trust.UNKNOWN, 9),
    ]


def test_equal_offers_are_one_and_have_the_trust_of_the_best():
    (one,) = sort(OfferBook(), [offer(STRANGER, 5), offer(RECENT, 5)])
    assert (one.peers, one.trust) == ((RECENT, STRANGER), Trust.RECENT)


def test_a_failure_rests_longer_each_time_and_another_blob_of_its_author_too():
    book, now, pauses = OfferBook(), 0.0, []
    for _ in range(9):
        (one,) = sort(book, [offer(WORKED, 5)], now)
        book.add(one, GONE, now)
        begun = now
        while not sort(book, [offer(WORKED, 5)], now):
            assert not sort(book, [offer(WORKED, 6)], now)
            now += 1.0
        pauses.append(now - begun)
    assert pauses[:4] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, 8 * RETRY_S]
    assert pauses[-1] == LAST_RETRY_S


def test_who_failed_comes_after_who_did_not():
    book = OfferBook()
    offers = [offer(WORKED, 9), offer(OTHER, 5)]
    trust = trust_by(ME, (), lambda peer: True)
    first = book.sort(offers, STATES, trust, 0.0)[0]
    assert first.round == 9
    book.add(first, GONE, 0.0)
    assert [one.round for one in book.sort(offers, STATES, trust, RETRY_S)] == [5, 9]


def test_a_liar_that_offers_the_same_blob_does_not_keep_it_out():
    book = OfferBook()
    (lie,) = sort(book, [offer(WORKED, 9)])
    book.add(lie, GONE, 0.0)
    (one,) = sort(book, [offer(WORKED, 5), offer(RECENT, 5)])
    assert one.peers == (RECENT,)


def test_a_true_blob_that_was_offered_as_another_rounds_is_still_tried():
    book = OfferBook()
    both = [offer(WORKED, 9, name=5), offer(RECENT, 5)]
    lie = sort(book, both)[1]
    assert lie.round == 9
    book.add(lie, DecodeError("another round"), 0.0)
    assert [one.round for one in sort(book, both)] == [5]
    assert [one.round for one in sort(book, both, REFUSED_S - 1)] == [5], "it is not tried again soon"


def test_what_is_nobodys_fault_rests_for_a_moment():
    for error, is_isolated in ((DiskFault("full", hint="free space"), False), (GONE, True)):
        book = OfferBook()
        (one,) = sort(book, [offer(RECENT, 5)])
        for now in (0.0, RETRY_S, 2 * RETRY_S):
            book.add(one, error, now, is_isolated=is_isolated)
            assert not sort(book, [offer(RECENT, 5)], now + RETRY_S - 1)
            assert sort(book, [offer(RECENT, 5)], now + RETRY_S)


@given(st.lists(st.tuples(st.integers(0, 40), st.floats(0.1, 60.0)), max_size=60))
def test_failures_are_forgotten(events):
    book, now = OfferBook(), 0.0
    for number, passes_s in events:
        now += passes_s
        peer = Identity(bytes([100 + number]) * 32).peer_id
        for one in sort(book, [SnapshotOffer(peer, blob(number), Round(5))], now):
            book.add(one, GONE, now)
    (last,) = sort(book, [offer(RECENT, 5)], now + LAST_RETRY_S + FORGET_S)
    book.add(last, GONE, now + LAST_RETRY_S + FORGET_S)
    assert len(book._peers) == len(book._blobs) == 1
