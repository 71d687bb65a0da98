"""The budget of newcomers: floods take their own places, work is kept, and what is named comes past it."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.p2p.ledger import newcomers as module
from atoll.p2p.ledger.newcomers import COOL_S, NewcomerQuota, Newcomers
from atoll.p2p.ledger.required import PROPOSERS
from atoll.p2p.ledger.shares import SHARE_BYTES
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.protocols.errors import DiskFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round, RunId, digest
from atoll.protocols.ledger.records import MAX_SET, Ack, Entry, decode_entry, sign_entry
from atoll.protocols.ledger.set_limit import VIA

RUN = RunId(digest(b"run"))
FAKES = [Identity(random.Random(number).randbytes(32)) for number in range(120)]
ANN, BEN, EVE, EVA = (Identity(bytes([number]) * 32).peer_id for number in range(1, 5))
HONEST = Identity(bytes([9]) * 32)
PLACES = 16


def feed(author: Identity, size: int = 1, what: bytes = b"") -> list[Entry]:
    entries: list[Entry] = []
    for seq in range(size):
        previous = entries[-1].id if entries else b""
        body = Ack(Round(seq), digest(b"set"), digest(b"state", what))
        entries.append(sign_entry(RUN, author, seq, previous, body))
    return entries


class World:
    """A ledger with a budget, a clock, and an address for each neighbour."""

    def __init__(self, path: Path, per_minute: int = 1000) -> None:
        path.mkdir(exist_ok=True)
        self.now = 0.0
        self.maddrs = {ANN: "/ip4/10.0.0.1/tcp/1", BEN: "/ip4/10.0.1.1/tcp/1", EVE: "/ip4/10.9.9.1/tcp/1"}
        self.maddrs[EVA] = "/ip4/10.9.9.77/udp/1/quic-v1"
        quota = NewcomerQuota(PLACES, per_minute)
        self.newcomers = Newcomers(quota, lambda: self.now, lambda peer: self.maddrs.get(peer, ""))
        self.ledger = Ledger(path / "ledger.sqlite", RUN, newcomers=self.newcomers)
        self.newcomers.is_replaying = False

    def bring(self, author: Identity, sender: PeerId, size: int = 1) -> bool:
        return bool(self.ledger.insert_all(feed(author, size), sender).fresh)

    def here(self) -> set[PeerId]:
        return set(self.ledger.vector())


@pytest.fixture
def world(tmp_path: Path):
    made = World(tmp_path)
    yield made
    made.ledger.close()


def test_a_flood_takes_its_own_places(world):
    assert world.bring(HONEST, BEN)
    for fake in FAKES:
        world.bring(fake, EVE)
    assert HONEST.peer_id in world.here()
    assert world.newcomers.counts == (0, 0, PLACES)
    assert world.newcomers.pruned == len(FAKES) + 1 - PLACES
    assert {e.author for _, e in world.ledger.since(0, 1000)} == world.here(), "their entries are off the disk"


def test_who_is_reached_directly_has_a_line_of_its_own_and_others_that_of_their_bringer(world):
    world.maddrs[HONEST.peer_id] = "/ip4/10.0.7.1/tcp/1"
    for author in (HONEST, *FAKES[:3]):
        world.bring(author, EVE)
    line = world.newcomers.line
    assert line(HONEST.peer_id) == "10.0.7.0/24", "whoever else brought it first"
    assert line(FAKES[0].peer_id) == f"{VIA}10.9.9.0/24"
    world.maddrs[FAKES[1].peer_id] = "/memory/1"
    assert line(FAKES[1].peer_id) == FAKES[1].peer_id, "no IP address of it is known"
    world.maddrs[FAKES[2].peer_id] = f"/ip4/10.0.1.1/tcp/1/p2p/{BEN}/p2p-circuit"
    assert line(FAKES[2].peer_id) == f"{VIA}10.9.9.0/24", "the address is that of a relay"
    del world.maddrs[EVE]
    assert line(FAKES[0].peer_id) == f"{VIA}10.9.9.0/24", "a bringer that leaves has no new line"
    assert line(BEN) == ""


def test_a_block_is_one_however_many_neighbours_it_has(world):
    """Two neighbours of one /24 bring as many as two of two blocks; the block is heavier."""
    world.bring(HONEST, ANN)
    for number, fake in enumerate(FAKES[:PLACES]):
        world.bring(fake, (ANN, EVE, EVA)[number % 3])
    first = {fake.peer_id for number, fake in enumerate(FAKES[:PLACES]) if number % 3 == 0}
    assert first | {HONEST.peer_id} <= world.here()


def test_the_idlest_of_them_goes(world):
    for fake in FAKES[:PLACES]:
        world.bring(fake, EVE)
    world.ledger.insert_all(feed(FAKES[0], 2)[1:], EVE)
    world.bring(FAKES[PLACES], EVE)
    assert {FAKES[0].peer_id, FAKES[PLACES].peer_id} <= world.here()
    assert FAKES[1].peer_id not in world.here()


def test_work_is_kept(world):
    accepted, worked = FAKES[0].peer_id, FAKES[1].peer_id
    for fake in FAKES[:2]:
        world.bring(fake, EVE)
    world.newcomers.accept([accepted])
    assert world.newcomers.vouch(worked)
    assert not world.newcomers.vouch(worked)
    for fake in FAKES[2:]:
        world.bring(fake, EVE)
    assert {accepted, worked} <= world.here()
    assert world.newcomers.counts == (1, 1, PLACES)
    assert [world.newcomers.is_tried(peer) for peer in (accepted, worked, FAKES[-1].peer_id)] == [
        True,
        True,
        False,
    ]


def test_everybody_is_tried_before_the_first_round_is_final(world):
    world.newcomers.accept([ANN], by_work=False)
    assert world.newcomers.is_tried(EVE)


def test_who_brings_itself_does_not_stand_in_line_with_a_flood(tmp_path: Path):
    world = World(tmp_path, per_minute=5)
    taken = sum(world.bring(fake, EVE) for fake in FAKES)
    assert taken == PLACES // 2 + 5, "free places, then the burst"
    assert sum(world.bring(fake, EVA) for fake in FAKES[100:110]) == 5, "and then the block has brought enough"
    world.maddrs[HONEST.peer_id] = "/ip4/10.9.9.5/tcp/1"  # of the flood's own block
    assert world.bring(HONEST, HONEST.peer_id)
    assert not world.bring(FAKES[-1], EVE)
    world.now += 60.0
    assert world.bring(FAKES[-1], EVE)
    world.ledger.close()


def test_a_block_has_twice_the_rate_of_a_neighbour(tmp_path: Path):
    world = World(tmp_path, per_minute=5)
    senders = [PeerId(f"eve{number}") for number in range(6)]
    world.maddrs |= {sender: f"/ip4/10.9.9.{number}/tcp/1" for number, sender in enumerate(senders)}
    taken = sum(world.bring(fake, senders[number % 6]) for number, fake in enumerate(FAKES))
    assert taken == PLACES // 2 + 10
    world.ledger.close()


def test_the_refused_hear_why(tmp_path: Path):
    world = World(tmp_path, per_minute=1)
    for fake in FAKES[:PLACES]:
        world.bring(fake, BEN if fake in FAKES[: PLACES // 2] else fake.peer_id)
    for fake in FAKES[PLACES:]:
        world.bring(fake, fake.peer_id)
    lost = next(fake.peer_id for fake in FAKES if fake.peer_id not in world.here())
    assert "ledger_newcomers" in world.ledger.refusal(lost)
    assert "stay connected" in world.ledger.refusal(lost)
    assert len(world.ledger.refusal(lost)) <= 200
    assert world.ledger.refusal(next(iter(world.here()))) == ""
    assert world.ledger.refusal(ANN) == "", "it never tried"
    world.ledger.close()


def test_the_pruned_come_back_by_themselves_only(world):
    for fake in FAKES[: PLACES + 1]:
        world.bring(fake, EVE)
    gone = FAKES[0]
    assert gone.peer_id not in world.here()
    assert not world.bring(gone, BEN)
    assert not world.ledger.insert_all(feed(gone, 2)[1:], BEN).gap, "and nobody asks for the rest"
    assert world.bring(gone, gone.peer_id)
    assert FAKES[1].peer_id not in world.here()
    world.now += COOL_S
    assert world.bring(FAKES[1], BEN)


def test_what_is_named_comes_past_the_budget(world):
    for fake in FAKES[:PLACES]:
        world.bring(fake, EVE)
    entries = feed(HONEST, 3)
    world.newcomers.require([entries[2].id], BEN)
    assert world.ledger.insert_all(entries[1:], EVE).gap, "its feed is asked for from the start"
    assert len(world.ledger.insert_all(entries, EVE).fresh) == 3
    for fake in FAKES[PLACES:]:
        world.bring(fake, EVE)
    assert HONEST.peer_id in world.here(), "and stays"
    world.newcomers.accept([ANN])
    for number in range(2 * PLACES):
        world.bring(Identity(random.Random(f"more {number}").randbytes(32)), EVE)
    assert HONEST.peer_id not in world.here(), "until the round is final with others"


def test_what_a_quorum_decided_comes_whatever_one_proposer_made_up(world):
    """Five proposals of a voter name five times as many entries as a set has: none of them exists."""
    for fake in FAKES[:PLACES]:
        world.bring(fake, EVE)
    entries = feed(HONEST, 3)
    world.newcomers.require([entries[2].id], None)
    for number in range(5):
        world.newcomers.require((digest(f"made up {number} {at}".encode()) for at in range(MAX_SET)), EVA)
    assert world.ledger.insert_all(entries[1:], EVE).gap, "its feed is asked for from the start"
    assert len(world.ledger.insert_all(entries, EVE).fresh) == 3
    for fake in FAKES[PLACES:]:
        world.bring(fake, EVE)
    assert HONEST.peer_id in world.here(), "and stays"


@pytest.mark.parametrize("liars", [1, PROPOSERS - 1])
def test_names_that_a_proposer_made_up_push_out_its_own_only(world, liars):
    """Another proposal of the round names a newcomer, while the places are taken."""
    for fake in FAKES[:PLACES]:
        world.bring(fake, EVE)
    honest, own = feed(HONEST, 3), feed(FAKES[PLACES], 3)
    world.newcomers.require([honest[2].id], BEN)
    for liar in FAKES[:liars]:
        for number in range(2 * PROPOSERS // liars + 1):
            made_up = (digest(f"made up {number} {at}".encode()) for at in range(MAX_SET))
            world.newcomers.require([own[2].id, *made_up], liar.peer_id)
    assert world.ledger.insert_all(honest[1:], EVE).gap, "its feed is asked for from the start"
    assert not world.ledger.insert_all(own[1:], EVE).gap, "the liar named more than a set may have"
    assert len(world.ledger.insert_all(honest, EVE).fresh) == 3
    sizes = [len(named) for named in world.newcomers._required._named.values()]
    assert len(sizes) <= PROPOSERS
    assert max(sizes) == MAX_SET


def test_the_entry_of_several_proposers_is_taken_once(world):
    entries = feed(HONEST, 1)
    for proposer in (ANN, BEN, EVE):
        world.newcomers.require([entries[0].id], proposer)
    assert world.newcomers.awaits_entries
    world.ledger.insert_all(entries, EVE)
    assert not world.newcomers.awaits_entries


def test_a_proposal_keeps_what_it_names(world):
    world.bring(HONEST, EVE)
    world.newcomers.keep([HONEST.peer_id])
    for fake in FAKES:
        world.bring(fake, EVE)
    assert HONEST.peer_id in world.here()


def test_pressed_ledgers_offer_no_new_authors(world):
    world.bring(HONEST, BEN)
    world.newcomers.vouch(HONEST.peer_id)
    for fake in FAKES[: PLACES // 2]:
        world.bring(fake, EVE)
    assert len(world.ledger.missing({}, 1 << 20)) == 1
    assert len(world.ledger.missing({FAKES[0].peer_id: 0}, 1 << 20)) == 2, "but to whom has the feed"


def test_a_newcomer_has_few_bytes_when_all_together_have_many(world, monkeypatch):
    world.bring(HONEST, BEN)
    peer = HONEST.peer_id
    world.newcomers.grow(peer, SHARE_BYTES)
    assert world.ledger.wanted()[peer] == 1
    monkeypatch.setattr(module, "SPARE_BYTES", SHARE_BYTES)
    assert world.ledger.wanted()[peer] == CLOSED
    done = world.ledger.insert_all(feed(HONEST, 3)[1:], BEN)
    assert (done.fresh, done.gap) == ((), False)
    world.newcomers.accept([peer])
    assert len(world.ledger.insert_all(feed(HONEST, 3)[1:], BEN).fresh) == 2


def test_proofs_of_the_pruned_go_too(world):
    world.bring(FAKES[0], EVE)
    assert world.ledger.insert_all(feed(FAKES[0], 1, b"other"), EVE).forks
    assert world.ledger.equivocators() == {FAKES[0].peer_id}
    for fake in FAKES[1:]:
        world.bring(fake, EVE)
    assert world.ledger.equivocators() == frozenset()
    assert world.ledger.proof(FAKES[0].peer_id) is None
    assert not world.ledger.add_proof(feed(FAKES[0])[0], feed(FAKES[0], 1, b"other")[0])


def test_places_are_open_until_the_ledger_is_replayed(tmp_path: Path):
    world = World(tmp_path)
    world.newcomers.is_replaying = True
    for fake in FAKES:
        assert world.bring(fake, EVE)
    world.newcomers.accept(fake.peer_id for fake in FAKES[:50])
    gone = world.ledger.end_replay()
    assert len(gone) == len(FAKES) - 50 - PLACES
    assert world.here() == {fake.peer_id for fake in FAKES} - set(gone)
    assert {fake.peer_id for fake in FAKES[:50]} <= world.here()
    assert world.ledger.end_replay() == ()
    world.ledger.close()
    again = World(tmp_path)
    assert again.here() == world.here()
    assert sum(again.newcomers.counts) == len(again.here())
    again.ledger.close()


def test_a_disk_that_fails_leaves_the_budget_as_it_was(world, monkeypatch):
    for fake in FAKES[:PLACES]:
        world.bring(fake, EVE)
    before = world.here()

    def fail(*values: object) -> None:
        raise DiskFault("full")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_write", fail)
        with pytest.raises(DiskFault):
            world.bring(FAKES[PLACES], EVE)
    assert world.here() == before
    assert {fake.peer_id for fake in FAKES if world.newcomers.is_new(fake.peer_id)} == before
    assert world.bring(FAKES[PLACES], EVE)


def noise(world, authors, sender=EVE):
    """Whoever of these the ledger takes is in a final set, with the members."""
    taken = [fake.peer_id for fake in authors if world.bring(fake, sender)]
    for peer in taken:
        world.newcomers.vouch(peer)
    world.newcomers.accept([ANN, BEN, *taken])
    return taken


def test_no_run_is_closed_by_authors_that_few_final_sets_name(world):
    """Places for eight: of those that worked once, who did so longest ago gives its place back."""
    world.newcomers.accepted.most = 8
    world.newcomers.accept([], by_work=False)  # the RunSpec names nobody
    world.bring(HONEST, BEN)
    for _ in range(3):
        world.newcomers.accept([ANN, BEN, HONEST.peer_id])
    for at in range(0, 40, 4):
        assert len(noise(world, FAKES[at : at + 4])) == 4
    accepted = world.newcomers.accepted
    assert (len(accepted), len(accepted.resting)) == (8, 35)
    assert HONEST.peer_id in accepted, "three sets name it, longest ago"
    assert all(fake.peer_id in accepted for fake in FAKES[36:40])
    assert not world.ledger.is_closed
    assert {ANN, BEN, *world.ledger.wanted()} == set(accepted._named)
    assert len(world.here()) == 41, "but their entries are on the disk"
    assert len(world.ledger.missing({}, 1 << 20)) == 6
    assert len(world.ledger.missing({FAKES[0].peer_id: 0}, 1 << 20)) == 7, "and come to who asks for them"


def test_whom_the_run_names_and_the_newest_final_set_does_not_rest(world):
    world.newcomers.accepted.most = 2
    world.newcomers.accept([EVA], by_work=False)
    world.newcomers.accept([HONEST.peer_id], by_work=False)  # of a summary
    world.newcomers.accept([ANN, BEN])
    world.newcomers.accept([EVE, BEN])
    assert set(world.newcomers.accepted._named) == {EVA, BEN, EVE}


def test_whom_a_summary_names_and_whose_feed_is_not_here_does_not_rest(world):
    """It would count as a feed that is here and takes no place."""
    world.newcomers.accepted.most = 2
    world.newcomers.accept([], by_work=False)
    world.bring(HONEST, HONEST.peer_id)
    world.newcomers.accept([HONEST.peer_id, *(fake.peer_id for fake in FAKES)], by_work=False)  # of a summary
    world.newcomers.accept([ANN, BEN])
    assert world.newcomers.accepted.resting == {HONEST.peer_id}
    assert world.ledger._awake() == 0


def test_who_rested_comes_back_as_a_newcomer_and_its_feed_never_goes(world):
    world.newcomers.accepted.most = 4
    world.newcomers.accept([], by_work=False)
    for at in range(0, 12, 2):
        noise(world, FAKES[at : at + 2])
    back, resting = FAKES[0], world.newcomers.accepted.resting
    assert back.peer_id in resting
    own = feed(back, 2)
    assert len(world.ledger.insert_all(own[1:], back.peer_id).fresh) == 1
    assert back.peer_id not in resting
    assert world.ledger.wanted()[back.peer_id] == 2
    assert world.newcomers.is_new(back.peer_id)
    for fake in FAKES[20:]:
        world.bring(fake, back.peer_id)
    assert back.peer_id in resting, "it lost its place again"
    assert world.ledger.get(own[1].id) is not None
    world.ledger.insert_all(feed(back, 3)[2:], back.peer_id)
    world.newcomers.accept([ANN, BEN, back.peer_id])
    assert back.peer_id in world.newcomers.accepted


def test_a_late_joiner_asks_for_the_feeds_of_those_that_rest(tmp_path: Path):
    world = World(tmp_path)
    entries = feed(HONEST, 3)
    world.newcomers.require([entries[2].id], None)
    assert world.ledger.insert_all(entries[2:], EVE).gap
    assert world.ledger.wanted() == {HONEST.peer_id: 0}
    world.ledger.insert_all(entries, EVE)
    assert world.ledger.wanted() == {HONEST.peer_id: 3}
    world.ledger.close()


def test_authors_that_a_liar_names_leave_room_in_the_vector_for_all_others(world):
    """It names 1,024 in each of several proposals, and brings one entry of each that can be stored nowhere."""
    world.bring(HONEST, BEN)
    for first in range(0, 3 * MAX_SET, MAX_SET):
        names = [digest(b"made up", number.to_bytes(4, "big")) for number in range(first, first + MAX_SET)]
        world.newcomers.require(names, EVE)
        for name in names:
            world.newcomers.note_named(name, PeerId(name.hex()))
    last = feed(FAKES[0], 2)[1]
    world.newcomers.require([last.id], None)
    world.ledger.insert_all([last], EVE)
    wanted = world.ledger.wanted(2 * MAX_SET)
    assert wanted[HONEST.peer_id] == 1
    assert wanted[FAKES[0].peer_id] == 0, "a quorum decided it"
    assert len(wanted) == MAX_SET + 1


def test_a_feed_that_rests_here_is_asked_for_again_where_a_set_names_what_it_lacks(world):
    """A node that was away has the start of it; the author came back, worked, and rests at all others by now."""
    world.newcomers.accepted.most = 4
    world.newcomers.accept([], by_work=False)
    for at in range(0, 12, 2):
        noise(world, FAKES[at : at + 2])
    back, entries = FAKES[0].peer_id, feed(FAKES[0], 4)
    assert back not in world.ledger.wanted()
    world.newcomers.require([entries[3].id], None)
    assert world.ledger.insert_all(entries[3:], EVE).gap, "it came by name"
    assert world.ledger.wanted()[back] == 1
    assert len(world.ledger.insert_all(entries[1:], EVE).fresh) == 3
    world.newcomers.accept([ANN, BEN, back])
    assert back in world.newcomers.accepted


def test_work_of_one_neighbour_or_one_block_takes_places_at_a_rate(tmp_path: Path):
    """None of them waits as new: the budget is never pressed."""
    world = World(tmp_path, per_minute=5)
    world.newcomers.accept([ANN, BEN])
    assert len(noise(world, FAKES[:40], EVE)) == 5
    assert world.newcomers.is_spent(EVE)
    assert len(noise(world, FAKES[40:80], EVA)) == 5, "of EVE's block"
    world.maddrs[FAKES[0].peer_id] = "/ip4/10.9.9.9/tcp/1"
    assert noise(world, FAKES[80:], FAKES[0].peer_id) == []
    assert not world.newcomers.is_pressed
    assert world.bring(HONEST, BEN)
    assert not world.newcomers.is_spent(BEN)
    world.now += 60.0
    assert len(noise(world, FAKES[10:60], EVE)) == 5
    world.ledger.close()


def test_refused_authors_keep_no_known_feed_from_coming(tmp_path: Path):
    """A neighbour's block is over its rate, and the feeds that are refused would fill each batch."""
    here, there = World(tmp_path / "here", per_minute=5), World(tmp_path / "there")
    there.bring(FAKES[0], EVE, size=9)
    there.bring(HONEST, ANN, size=9)
    here.bring(HONEST, BEN, size=3)
    here.newcomers.accept([ANN, HONEST.peer_id])
    noise(here, FAKES[20:40], EVE)
    noise(here, FAKES[40:60], EVA)
    neighbour = FAKES[1].peer_id
    here.maddrs[neighbour] = "/ip4/10.9.9.9/tcp/1"  # of EVE's block
    batch = there.ledger.missing(here.ledger.wanted(), 600, only_known=here.newcomers.is_spent(neighbour))
    here.ledger.insert_all([decode_entry(data, RUN) for data in batch], neighbour)
    assert here.ledger.vector()[HONEST.peer_id] > 3
    assert FAKES[0].peer_id not in here.here()
    here.ledger.close()
    there.ledger.close()


def test_a_neighbour_that_brought_enough_takes_nothing_of_its_block(tmp_path: Path):
    world = World(tmp_path, per_minute=5)
    world.newcomers.accept([ANN, BEN])
    noise(world, FAKES, EVE)
    assert world.bring(HONEST, EVA), "of EVE's block"
    world.ledger.close()


Event = st.tuples(
    st.sampled_from(["bring", "own", "vouch", "accept", "more"]), st.integers(0, 39), st.integers(0, 3)
)


@settings(max_examples=60, deadline=None)
@given(st.lists(Event, max_size=120))
def test_laws(tmp_path_factory, events) -> None:
    """Places are bounded, who is accepted or worked stays, and the counts are those of the ledger."""
    world = World(tmp_path_factory.mktemp("law"))
    world.newcomers.quota = NewcomerQuota(6)
    kept: set[PeerId] = set()
    try:
        for what, number, sender in events:
            fake = FAKES[number]
            match what:
                case "bring":
                    world.bring(fake, (ANN, BEN, EVE, EVA)[sender])
                case "own":
                    world.bring(fake, fake.peer_id)
                case "more":
                    world.ledger.insert_all(feed(fake, 4), fake.peer_id)
                case "vouch" if fake.peer_id in world.here():
                    world.newcomers.vouch(fake.peer_id)
                    kept.add(fake.peer_id)
                case "accept" if fake.peer_id in world.here():
                    world.newcomers.accept([fake.peer_id])
                    kept.add(fake.peer_id)
            assert kept <= world.here()
            assert sum(world.newcomers.counts) == len(world.here())
            assert world.newcomers.counts[2] <= 6
        sizes = {author: feed.size_bytes for author, feed in world.ledger._feeds.items()}
        held = {author: each.size_bytes for author, each in world.newcomers._held.items()}
        assert held == {author: sizes[author] for author in held}
        assert world.newcomers._bytes == sum(held.values())
    finally:
        world.ledger.close()
