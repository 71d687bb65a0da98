"""Shares of a ledger: no few authors fill it for all, members are never refused, and what is named comes past."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.newcomers import NewcomerQuota, Newcomers
from atoll.p2p.ledger.shares import AHEAD_ROUNDS, ROUND_BYTES, SHARE_BYTES, STRICT, LedgerRoom, Need, Quota, Shares
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import (
    MAX_SET,
    Ack,
    Ballot,
    Body,
    Entry,
    Proposal,
    Vote,
    encode_entry,
    sign_entry,
)

RUN = RunId(digest(b"run"))
ME, ANN, BEN = (Identity(bytes([number]) * 32) for number in range(1, 4))
SYBILS = [Identity(bytes([number + 100]) * 32) for number in range(40)]
NAMES = tuple(sorted(Digest(digest(n.to_bytes(2, "big"))) for n in range(1000)))
DISK = 64 << 20
SMALL = Quota(disk_bytes=DISK)
EVE, EVA, ADA = (PeerId(name) for name in ("eve", "eva", "ada"))


class Feeds:
    """Feeds that grow."""

    def __init__(self) -> None:
        self.heads: dict[PeerId, tuple[int, bytes]] = {}

    def next(self, author: Identity, body: Body) -> Entry:
        seq, head = self.heads.get(author.peer_id, (0, b""))
        entry = sign_entry(RUN, author, seq, head, body)
        self.heads[author.peer_id] = (seq + 1, entry.id)
        return entry


def large(author: Identity, number: int = 900) -> Proposal:
    return Proposal(Round(number), Ballot(0, author.peer_id), NAMES, digest(b"state"))


def small(number: int) -> Ack:
    return Ack(Round(number), digest(b"set"), digest(b"state"))


def opened(path: Path, quota: Quota = SMALL) -> Ledger:
    shares = Shares(ME.peer_id, quota)
    ledger = Ledger(
        path / "l.sqlite", RUN, quota, newcomers=Newcomers(NewcomerQuota(), lambda: 0.0, shares=shares)
    )
    return ledger


def written(ledger: Ledger, feeds: Feeds, author: Identity) -> int:
    """The author writes large entries until it is refused; how many were stored."""
    stored = 0
    while True:
        began = feeds.heads.get(author.peer_id, (0, b""))
        entries = [feeds.next(author, large(author, 900 + stored + number)) for number in range(8)]
        fresh = ledger.insert_all(entries, author.peer_id).fresh
        stored += len(fresh)
        if len(fresh) < len(entries):
            feeds.heads[author.peer_id] = (fresh[-1].seq + 1, fresh[-1].id) if fresh else began
            return stored


def used(ledger: Ledger) -> int:
    return ledger._db.used_bytes


# --- the attack of audit13/full_ledger.py ----------------------------------------------------------


def test_forty_accepted_identities_do_not_fill_the_ledger_for_all(tmp_path: Path) -> None:
    """Each has one contribution in a final set, and writes as much as it can; the ledger has 64 MiB."""
    ledger, feeds = opened(tmp_path), Feeds()
    ledger.append(ME, small(0))
    for _ in range(100):
        ledger.newcomers.accept([ME.peer_id, ANN.peer_id])
    ledger.newcomers.accept([ME.peer_id, ANN.peer_id, *(one.peer_id for one in SYBILS)])
    ledger.end_replay()
    stored = [written(ledger, feeds, one) for one in SYBILS]
    one_bytes = len(encode_entry(feeds.next(BEN, large(BEN))))
    share = SHARE_BYTES + (1 + AHEAD_ROUNDS) * ROUND_BYTES
    assert all(share <= count * one_bytes < share + DISK // 64 + one_bytes for count in stored)
    assert sum(count * one_bytes for count in stored) < 40 * share + DISK // 64 + 40 * one_bytes
    assert used(ledger) < DISK * 3 // 4
    for number in range(200):
        ledger.append(ME, Vote(Round(number), Ballot(0, ME.peer_id), digest(b"x")))
        assert ledger.insert_all([feeds.next(ANN, small(number))], ANN.peer_id).fresh
    ledger.close()


def test_a_full_ledger_stores_our_own_entries_to_the_end(tmp_path: Path) -> None:
    """Members that earned more than the file holds: what they write never comes to the last part of it."""
    quota = Quota(disk_bytes=4 << 20)
    ledger, feeds = opened(tmp_path, quota), Feeds()
    authors = [ANN, BEN, *SYBILS[:6]]
    for _ in range(500):
        ledger.newcomers.accept([one.peer_id for one in authors])
    ledger.end_replay()
    for author in authors:
        written(ledger, feeds, author)
    assert ledger.newcomers.shares.room is LedgerRoom.OWN
    assert quota.disk_bytes * 30 // 32 < used(ledger) < quota.disk_bytes
    assert ledger.is_closed, "nobody need bring others again and again"
    refused = ledger.insert_all([feeds.next(ANN, small(1))], ANN.peer_id)
    assert (refused.fresh, refused.forks, refused.gap) == ((), (), False)
    assert "stores its own node's records only" in ledger.refusal(ANN.peer_id)
    assert ledger.refusal(SYBILS[30].peer_id) == "", "it never tried"
    assert not ledger.insert_all([feeds.next(SYBILS[30], small(1))], SYBILS[30].peer_id).fresh
    assert "(ledger_bytes)" in ledger.refusal(SYBILS[30].peer_id)
    first, second = Feeds().next(ANN, small(1)), Feeds().next(ANN, small(2))
    assert not ledger.add_proof(first, second), "nor proofs"
    assert not ledger.insert_all([first, second], BEN.peer_id).forks
    for number in range(200):
        assert ledger.append(ME, small(number))
    ledger.close()


@pytest.mark.parametrize(("disk", "room"), [(64 << 20, LedgerRoom.ALL), (6 << 20, LedgerRoom.WORKING)])
def test_a_node_that_starts_again_refuses_no_member_before_its_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, room: LedgerRoom
) -> None:
    """Its first exchange may come before the replay has said who worked."""
    monkeypatch.setattr("atoll.p2p.ledger.newcomers.SPARE_BYTES", 1 << 20)
    quota = Quota(disk_bytes=disk)
    ledger, feeds = opened(tmp_path, quota), Feeds()
    for _ in range(400):
        ledger.newcomers.accept([ME.peer_id, ANN.peer_id])
    ledger.end_replay()
    entries = 0
    while entries < 120 or (room and 8 * (disk - used(ledger)) > disk):
        assert ledger.insert_all([feeds.next(ANN, large(ANN, entries))], ANN.peer_id).fresh
        entries += 1
    ledger.close()
    again = opened(tmp_path, quota)
    assert again.wanted()[ANN.peer_id] == entries
    assert again.refusal(ANN.peer_id) == ""
    assert again.insert_all([feeds.next(ANN, small(1))], ANN.peer_id).fresh
    assert again.newcomers.shares.room is room
    again.newcomers.accept([ME.peer_id, BEN.peer_id])
    assert again.wanted()[ANN.peer_id] == CLOSED, "after the replay its share counts, and no set named it"
    again.close()
    again = opened(tmp_path, quota)
    more = [feeds.next(ANN, large(ANN, entries + number)) for number in range(20)]
    stored = len(again.insert_all(more, ANN.peer_id).fresh)
    assert 0 < stored < 5, "128 KiB more, whoever it is"
    again.close()


def test_orphans_do_not_fill_the_end_either(tmp_path: Path) -> None:
    ledger = opened(tmp_path)
    ledger.newcomers.accept([ANN.peer_id])
    assert ledger.add_proof(Feeds().next(ANN, small(1)), Feeds().next(ANN, small(2)))
    assert len(ledger.add_orphans([Feeds().next(ANN, small(3))])) == 1
    ledger.newcomers.shares.measure(DISK)
    assert ledger.add_orphans([Feeds().next(ANN, small(4))]) == ()
    ledger.close()


def test_the_user_is_told_when_the_file_fills_up(caplog: pytest.LogCaptureFixture) -> None:
    shares = world()
    for parts in (0.5, 0.7, 0.8, 0.79, 0.7, 0.8, 0.9, 0.98):
        shares.measure(int(parts * shares.quota.disk_bytes))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3, "once for each room"
    assert "the ledger has 6553 of at most 8192 MiB, and room for records of others that are short" in told[0]
    assert "this node's own records only" in told[2]
    assert all("ledger_bytes" in line for line in told)


# --- who has room ----------------------------------------------------------------------------------


def world(used_parts: float = 0.0, quota: Quota | None = None) -> Shares:
    shares = Shares(ME.peer_id, quota or Quota())
    shares.used_bytes = int(used_parts * shares.quota.disk_bytes)
    return shares


@pytest.mark.parametrize(
    ("parts", "room"),
    [
        (0, LedgerRoom.ALL),
        (0.74, LedgerRoom.ALL),
        (0.75, LedgerRoom.MODEST),
        (0.88, LedgerRoom.WORKING),
        (0.97, LedgerRoom.OWN),
        (1, LedgerRoom.OWN),
    ],
)
def test_rooms(parts: float, room: LedgerRoom) -> None:
    assert world(parts).room is room


def full_at(shares: Shares, author: PeerId, need: Need = Need.NONE) -> int:
    """Bytes at which the author has no more room, to 1 KiB."""
    size = 0
    while not shares.is_full(author, need):
        shares.grow(author, 1024)
        size += 1024
        assert size < 1 << 28
    return size


def test_each_final_round_lets_an_author_write_more() -> None:
    shares = world()
    shares.grow(EVA, SHARE_BYTES + AHEAD_ROUNDS * ROUND_BYTES + shares.quota.disk_bytes // 64)  # no spare
    for rounds in range(3):
        assert full_at(shares, EVE) <= ROUND_BYTES or not rounds
        assert shares._sizes[EVE] == SHARE_BYTES + (AHEAD_ROUNDS + rounds) * ROUND_BYTES
        shares.count_round([EVE])
    assert not shares.is_full(EVE)


def test_one_author_takes_an_eighth_of_the_spare() -> None:
    shares = world()
    share = SHARE_BYTES + AHEAD_ROUNDS * ROUND_BYTES
    spare = shares.quota.disk_bytes // 64
    sizes = [full_at(shares, PeerId(f"eve{number}")) for number in range(10)]
    assert sizes == [share + spare // 8] * 8 + [share] * 2
    assert full_at(shares, PeerId("eve9"), Need.NAMED) == spare // 8, "beyond it comes what is named"


def test_the_reserve_is_for_those_within_strict_shares() -> None:
    shares = world(0.75)
    strict = SHARE_BYTES + AHEAD_ROUNDS * ROUND_BYTES // STRICT
    assert full_at(shares, EVE) == strict
    assert full_at(shares, EVE, Need.NAMED) > 0, "what is named comes past it"
    assert full_at(shares, EVA, Need.NAMED) == (
        SHARE_BYTES + AHEAD_ROUNDS * ROUND_BYTES + shares.quota.disk_bytes // 512
    )


def test_the_last_eighth_is_for_those_that_work() -> None:
    shares = world()
    for number in range(80):
        shares.count_round([ADA, EVA] if number == 0 else [ADA, EVE] if number > 70 else [ADA])
    shares.count_round([ADA])
    shares.used_bytes = shares.quota.disk_bytes * 9 // 10
    assert [shares.is_full(who) for who in (ADA, EVE, EVA)] == [False, True, True]
    assert not shares.is_full(EVA, Need.NAMED)
    for _ in range(2):
        shares.count_round([ADA, EVE])
    shares.count_round([ADA])
    assert not shares.is_full(EVE), "an eighth as long as the longest"
    shares.count_round([EVA])
    assert not shares.is_full(EVA), "the newest final set names it"
    shares.grow(EVA, SHARE_BYTES + (AHEAD_ROUNDS + 2) * ROUND_BYTES // STRICT)
    assert shares.is_full(EVA, Need.NAMED), "it has its strict share"
    assert not shares.is_full(EVA, Need.DECIDED), "without it this node could follow no more"
    shares.used_bytes = shares.quota.disk_bytes
    assert shares.is_full(EVA, Need.DECIDED)


def test_this_node_has_room_to_the_end() -> None:
    shares = world(1.0)
    shares.grow(ME.peer_id, 1 << 30)
    assert not shares.is_full(ME.peer_id)
    assert shares._beyond == 0


# --- what a ledger makes of it -----------------------------------------------------------------------


def test_the_refused_hear_why(tmp_path: Path) -> None:
    ledger, feeds = opened(tmp_path), Feeds()
    authors = [ANN, BEN, *SYBILS[:8]]
    ledger.newcomers.accept([one.peer_id for one in authors])
    ledger.end_replay()
    for author in authors:
        written(ledger, feeds, author)
    told = ledger.refusal(ANN.peer_id)
    assert told.endswith("(ledger_round_bytes); a new identity begins anew")
    assert "MiB with work in 1 final rounds" in told
    assert len(told) <= 200
    assert ledger.wanted()[ANN.peer_id] == CLOSED
    assert ledger.refusal(ME.peer_id) == ""
    for _ in range(4):
        ledger.newcomers.accept([ANN.peer_id])
    assert ledger.refusal(ANN.peer_id) == ""
    assert ledger.wanted()[ANN.peer_id] < CLOSED
    ledger.newcomers.shares.used_bytes = DISK * 4 // 5
    assert len(ledger.refusal(BEN.peer_id)) <= 200
    assert "nearly full (ledger_bytes)" in ledger.refusal(BEN.peer_id)
    ledger.close()


def test_a_required_entry_comes_past_the_share(tmp_path: Path) -> None:
    ledger, feeds = opened(tmp_path), Feeds()
    authors = [BEN, *SYBILS[:8], ANN]
    ledger.newcomers.accept([one.peer_id for one in authors])
    ledger.end_replay()
    for author in authors:
        written(ledger, feeds, author)
    rest = [feeds.next(ANN, small(number)) for number in range(3)]
    assert not ledger.insert_all(rest, BEN.peer_id).fresh
    ledger.newcomers.require([rest[2].id], EVE)
    assert ledger.wanted()[ANN.peer_id] < CLOSED, "its author is not known yet: all may bring it"
    assert len(ledger.insert_all(rest, BEN.peer_id).fresh) == 3
    assert ledger.wanted()[SYBILS[7].peer_id] == CLOSED, "it came"
    ledger.newcomers.require([digest(b"made up")], EVE)
    assert ledger.wanted()[ANN.peer_id] < CLOSED
    assert ledger.wanted()[BEN.peer_id] == CLOSED, "it took its part of the spare, and a liar may name anything"
    ledger.newcomers.require([digest(b"decided")], None)
    assert ledger.wanted()[BEN.peer_id] < CLOSED
    ledger.newcomers.accept([SYBILS[30].peer_id])
    ended = ledger.wanted()
    assert ended[ANN.peer_id] == ended[BEN.peer_id] == CLOSED, "a liar holds nothing open beyond its round"
    ledger.close()


def test_shares_are_the_same_after_a_restart_and_a_cut(tmp_path: Path) -> None:
    ledger, feeds = opened(tmp_path), Feeds()
    authors = [ANN, BEN, *SYBILS[:9]]
    ledger.newcomers.accept([one.peer_id for one in authors])
    ledger.end_replay()
    for author in authors:
        written(ledger, feeds, author)
    before = ledger.wanted()
    assert CLOSED in before.values()
    sizes = dict(ledger.newcomers.shares._sizes)
    ledger.close()
    again = opened(tmp_path)
    again.newcomers.accept([one.peer_id for one in authors])
    again.end_replay()
    assert again.newcomers.shares._sizes == sizes
    assert again.wanted() == before
    again.cut(Cut(b"summary", 2000))
    assert again.wanted() == before, "the rounds that are gone still count, and so do their records"
    again.close()
    recent = opened(tmp_path)
    recent.newcomers.accept([one.peer_id for one in authors])
    assert CLOSED not in recent.wanted().values(), "neither does where both are gone"
    recent.close()


def test_the_pruned_take_no_room(tmp_path: Path) -> None:
    ledger, feeds = opened(tmp_path), Feeds()
    ledger.newcomers.quota = NewcomerQuota(8)
    ledger.end_replay()
    for author in SYBILS[:12]:
        ledger.insert_all([feeds.next(author, large(author))], ANN.peer_id)
    assert set(ledger.newcomers.shares._sizes) == set(ledger.vector())
    ledger.close()


def test_a_batch_that_is_not_stored_takes_no_room(tmp_path: Path, monkeypatch) -> None:
    ledger, feeds = opened(tmp_path), Feeds()
    ledger.insert_all([feeds.next(ANN, small(1))], ANN.peer_id)
    sizes = dict(ledger.newcomers.shares._sizes)
    write, calls = Ledger._write, []

    def fail(self: Ledger, entry: Entry, feed: object) -> object:
        calls.append(entry)
        if len(calls) > 1:
            raise KeyError
        return write(self, entry, feed)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", fail)
        with pytest.raises(KeyError):
            ledger.insert_all([feeds.next(ANN, small(2)), feeds.next(ANN, small(3))], ANN.peer_id)
    assert len(calls) == 2
    assert ledger.newcomers.shares._sizes == sizes
    ledger.close()


# --- laws --------------------------------------------------------------------------------------------

CONTRIBUTION, ACK, VOTE, REDUCTION = 450, 250, 400, 1000
"""Bytes of a member's entries, rounded up; a Proposal has 300 and 34 for each name."""


def round_of_a_member(number: int, members: int, *, is_reduced: bool) -> list[int]:
    """Sizes of what the first of so many members writes about a round in which it proposes once a turn."""
    sizes = [CONTRIBUTION, ACK, VOTE, *([REDUCTION] if is_reduced else [])]
    return [*sizes, 300 + 34 * members] if number % members == 0 else sizes


def without_spare(parts: float) -> Shares:
    shares = world()
    shares.grow(EVE, 1 << 30)
    shares.measure(int(parts * shares.quota.disk_bytes))
    return shares


@settings(max_examples=100, deadline=None)
@given(
    members=st.integers(1, MAX_SET),
    lag=st.integers(1, 64),
    is_reduced=st.booleans(),
    parts=st.sampled_from([0.5, 0.8]),
    seed=st.integers(0, 1 << 30),
)
def test_a_member_at_full_pace_is_never_refused(members, lag, is_reduced, parts, seed) -> None:
    """Others took the spare. Its rounds are final up to `lag` rounds after it wrote them, at any moment."""
    rng, shares, final = random.Random(seed), without_spare(parts), 0
    for number in range(200):
        for size in round_of_a_member(number, members, is_reduced=is_reduced):
            assert not shares.is_full(ADA)
            shares.grow(ADA, size)
        while final + lag <= number or (final < number and rng.random() < 0.1):
            shares.count_round([ADA])
            final += 1


def test_a_member_that_one_set_in_thirty_names_is_never_refused() -> None:
    shares = without_spare(0.5)
    for number in range(3000):
        for size in round_of_a_member(number, 8, is_reduced=True):
            assert not shares.is_full(ADA)
            shares.grow(ADA, size)
        if number % 30 == 0:
            shares.count_round([ADA])


Feed = Sequence[tuple[int, Digest | None]]
"""Sizes of entries, with the names of those that are contributions of a final set."""


class Replica:
    """A budget that reads feeds as a ledger does, and decides rounds once it has what their sets name."""

    def __init__(self) -> None:
        self.budget = Newcomers(NewcomerQuota(), lambda: 0.0, shares=Shares(ME.peer_id, Quota()))
        self.budget.is_replaying = False
        self.at: dict[PeerId, int] = {}
        self.named: set[Digest] = set()

    def read(self, author: PeerId, feed: Feed) -> bool:
        """Store what there is room for; whether that was anything."""
        began = self.at.setdefault(author, 0)
        self.budget.take_place(author, author)
        while self.at[author] < len(feed) and not self.budget.is_full(author):
            size, name = feed[self.at[author]]
            self.budget.grow(author, size)
            self.at[author] += 1
            if name is not None:
                self.budget.note_named(name, author)
                self.named.add(name)
        return self.at[author] > began

    def left_bytes(self, author: PeerId) -> int:
        """What the author may write here beyond its share, too."""
        shares = self.budget.shares
        return shares._share(author) + shares.quota.disk_bytes // 512 - shares._sizes.get(author, 0)

    def read_any(self, feeds: Mapping[PeerId, Feed]) -> bool:
        """Whether something could be read since it last asked for names."""
        return any(self.at[who] < len(feed) and not self.budget.is_full(who) for who, feed in feeds.items())

    def decide(self, sets: Sequence[dict[PeerId, Digest]]) -> bool:
        """Decide the next of these rounds, if it can; else ask for what its set names."""
        if not sets:
            return False
        if self.named.issuperset(sets[0].values()):
            self.budget.accept(sets[0])
            return True
        self.budget.require((name for name in sets[0].values() if name not in self.named), None)
        return False


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), rounds=st.integers(1, 60), gone=st.integers(0, 59), liars=st.integers(0, 6))
@example(seed=1, rounds=60, gone=50, liars=6)
def test_who_comes_late_reads_all_that_sets_name_in_any_order(seed, rounds, gone, liars) -> None:
    """Liars that work write all that a first node stores, before and after their work; a second reads it later.

    It may begin with a summary of the first rounds, and counts no work before it. Whatever it reads first, it
    decides all rounds, and has all of the members' feeds.
    """
    rng, first, gone = random.Random(seed), Replica(), min(gone, rounds - 1)
    members = [PeerId(f"ann{number}") for number in range(3)]
    evils = [PeerId(f"eve{number}") for number in range(liars)]
    feeds: dict[PeerId, list[tuple[int, Digest | None]]] = {who: [] for who in [*members, *evils]}
    floors, sets = dict.fromkeys(feeds, 0), []
    for number in range(rounds):
        if number == gone:
            floors = {who: len(feed) for who, feed in feeds.items()}
        names = {}
        for who in rng.sample([*members, *evils], len(feeds)):
            if who in evils and number >= gone and rng.random() < 0.5:
                most = max(1, first.left_bytes(who) // 60_000 - 2)  # and its work still comes into the sets
                feeds[who] += [(60_000, None)] * min(most, rng.choice([1, 10, most]))
            before = first.at.get(who, 0)
            first.read(who, [*feeds[who], (CONTRIBUTION, name := digest(who.encode(), bytes([number])))])
            del feeds[who][max(before, first.at[who]) :]
            if first.at[who] > len(feeds[who]):
                feeds[who].append((CONTRIBUTION, name))
                if who in members or rng.random() < 0.7:
                    names[who] = name
        assert set(members) <= names.keys()
        assert first.decide([names])
        sets.append(names)
    late, missing = Replica(), sets[gone:]
    if gone:
        late.budget.accept({who for names in sets[:gone] for who in names})
        feeds = {who: feed[floors[who] :] for who, feed in feeds.items()}
    while missing:
        # All feeds as far as there is room, then all rounds whose sets are here: the last one asks for its names.
        moved = sum(late.read(who, feeds[who]) for who in rng.sample(list(feeds), len(feeds)))
        while late.decide(missing):
            del missing[0]
            moved += 1
        assert moved or late.read_any(feeds), "it waits for what it refuses"
    while sum(late.read(who, feeds[who]) for who in members):
        pass
    assert all(late.at[who] == len(feeds[who]) for who in members)
