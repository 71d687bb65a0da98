"""Admission at the ledger: strangers are kept out, members are not, and replicas end with the same authors."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.node.runs.presets import preset
from atoll.p2p.ledger.admission_gate import AdmissionGate
from atoll.p2p.ledger.store import Ledger
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.records import Admit, Body, Entry, Leave, Solved, sign_entry
from atoll.protocols.run.admission import (
    PUZZLE_SLICE,
    AdmissionSpec,
    Rule,
    Token,
    is_solved,
    make_token,
    prove,
    solutions,
)

OWNER, ANN, BEN, EVE, ME = (Identity(bytes([number]) * 32) for number in range(1, 6))
DAY_S = 86400
NOW = 1_800_000_000
SPEC = msgspec.structs.replace(
    preset("tiny", OWNER.peer_id, 1), admission=AdmissionSpec(mode="invite", members=(BEN.peer_id,))
)
TOKEN = make_token(SPEC.id, OWNER, bytes(32), NOW + DAY_S, members=2)


def feed(author: Identity, *bodies: Admit | Leave) -> list[Entry]:
    entries: list[Entry] = []
    for seq, body in enumerate(bodies):
        entries.append(sign_entry(SPEC.id, author, seq, entries[-1].id if entries else b"", body))
    return entries


def leaves(count: int) -> list[Leave]:
    return [Leave(Round(number)) for number in range(count)]


def joined(author: Identity, token: Token = TOKEN, count: int = 2) -> list[Entry]:
    return feed(author, Admit(token.permit, prove(SPEC.id, token, author.peer_id)), *leaves(count))


class World:
    """Ledgers with a clock of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unix_s = float(NOW)
        self.opened: list[Ledger] = []
        self._names = itertools.count()

    def ledger(self, me: Identity = ME, spec=SPEC, name: str = "") -> Ledger:
        path = self.path / (name or f"{next(self._names)}.sqlite")
        self.opened.append(Ledger(path, spec.id, gate=AdmissionGate(spec, me.peer_id, lambda: self.unix_s)))
        return self.opened[-1]

    def member(self) -> Ledger:
        """A ledger that has met the owner: it judges strangers by the clock."""
        ledger = self.ledger()
        ledger.insert_all(feed(OWNER, *leaves(1)), OWNER.peer_id)
        ledger.end_bootstrap(OWNER.peer_id)
        return ledger


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    for ledger in made.opened:
        ledger.close()


def authors(ledger: Ledger) -> set[PeerId]:
    return set(ledger.vector())


def test_who_gets_in(world: World) -> None:
    ledger = world.member()
    for author, entries in ((ANN, joined(ANN)), (BEN, feed(BEN, *leaves(2)))):
        assert len(ledger.insert_all(entries, author.peer_id).fresh) == len(entries)
    assert authors(ledger) == {OWNER.peer_id, ANN.peer_id, BEN.peer_id}
    assert ledger.admits(ANN.peer_id)
    assert not ledger.refusal(ANN.peer_id)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (feed(EVE, *leaves(3)), "is by invitation"),
        (feed(EVE, Admit(TOKEN.permit, prove(SPEC.id, TOKEN, ANN.peer_id)), *leaves(1)), "for another peer"),
        (joined(EVE, make_token(SPEC.id, EVE, bytes(32), NOW + DAY_S)), "not signed by the owner"),
    ],
)
def test_who_does_not(world: World, entries: list[Entry], said: str) -> None:
    for ledger in (world.member(), world.ledger()):
        for sender in (EVE.peer_id, OWNER.peer_id, None):
            done = ledger.insert_all(entries, sender)
            assert (done.fresh, done.gap, done.forks) == ((), False, ())
        assert EVE.peer_id not in authors(ledger)
        assert not ledger.admits(EVE.peer_id)
        assert said in ledger.refusal(EVE.peer_id)
        assert not ledger.add_proof(entries[0], feed(EVE, Leave(Round(9)))[0])


def test_a_refusal_is_told_once_and_then_kept(world: World) -> None:
    ledger = world.member()
    ((peer, reason),) = ledger.insert_all(feed(EVE, *leaves(1)), EVE.peer_id).refused
    assert (peer, "by invitation" in reason) == (EVE.peer_id, True)
    assert ledger.insert_all(feed(EVE, *leaves(2)), EVE.peer_id).refused == ()
    assert ledger.insert_all(joined(EVE), EVE.peer_id).fresh, "an invite may come later, to a new feed"
    assert ledger.refusal(EVE.peer_id) == ""


def test_an_unknown_feed_in_the_middle_is_a_gap(world: World) -> None:
    assert world.member().insert_all(joined(ANN)[1:], ANN.peer_id).gap, "its permit may come"


def test_an_expired_permit_is_not_taken_from_its_holder(world: World) -> None:
    ledger = world.member()
    world.unix_s = NOW + 3 * DAY_S
    assert not ledger.insert_all(joined(ANN), ANN.peer_id).fresh
    assert "expired 2 d 0 h ago" in ledger.refusal(ANN.peer_id)
    assert not ledger.insert_all(joined(ANN), EVE.peer_id).fresh, "nor from a stranger of its choice"
    done = ledger.insert_all(joined(ANN), OWNER.peer_id)
    assert len(done.fresh) == 3, "a member let it in while the permit was good"


def test_a_replay_and_a_restart_judge_nobody_by_the_clock(world: World) -> None:
    first = world.ledger(name="a")
    first.insert_all(feed(ME, *leaves(0)) or feed(BEN, *leaves(1)), BEN.peer_id)
    first.insert_all(joined(ANN), ANN.peer_id)
    first.close()
    world.unix_s = NOW + 400 * DAY_S
    again = world.ledger(name="a")
    assert authors(again) == {ANN.peer_id, BEN.peer_id}
    assert again.insert_all(feed(ANN, joined(ANN)[0].body, *leaves(3)), ANN.peer_id).fresh, "members write on"


def test_a_newcomer_takes_genuine_permits_until_it_is_synced(world: World) -> None:
    world.unix_s = NOW + 3 * DAY_S
    newcomer = world.ledger()
    assert newcomer.insert_all(joined(ANN), ANN.peer_id).fresh
    assert not newcomer.insert_all(feed(EVE, *leaves(1)), EVE.peer_id).fresh
    newcomer.end_bootstrap(EVE.peer_id)
    late = make_token(SPEC.id, OWNER, bytes([7]) * 32, NOW)
    assert newcomer.insert_all(joined(EVE, late), EVE.peer_id).fresh, "a stranger's exchange settles nothing"
    newcomer.end_bootstrap(ANN.peer_id)
    other = Identity(bytes([9]) * 32)
    assert not newcomer.insert_all(joined(other, late), other.peer_id).fresh


def test_a_permit_is_used_up(world: World) -> None:
    ledger = world.member()
    crowd = [Identity(bytes([number]) * 32) for number in range(10, 13)]
    taken = [bool(ledger.insert_all(joined(one), one.peer_id).fresh) for one in crowd]
    assert taken == [True, True, False]
    assert "used up: 2 of 2" in ledger.refusal(crowd[2].peer_id)


def test_who_joined_with_a_permit_counts_itself(world: World) -> None:
    ledger = world.ledger()
    ledger.append(ME, Admit(TOKEN.permit, prove(SPEC.id, TOKEN, ME.peer_id)))
    ledger.insert_all(feed(OWNER, *leaves(1)), OWNER.peer_id)
    ledger.end_bootstrap(OWNER.peer_id)
    assert ledger.insert_all(joined(ANN), ANN.peer_id).fresh
    assert not ledger.insert_all(joined(EVE), EVE.peer_id).fresh
    assert "used up: 2 of 2" in ledger.refusal(EVE.peer_id)


def test_our_own_feed_begins_with_our_permit(world: World) -> None:
    ledger = world.ledger()
    with pytest.raises(ConfigError) as caught:
        ledger.append(ME, Leave(Round(0)))
    assert caught.value.line().endswith("has shown no permit; ask the run's owner for an invite")
    ledger.append(ME, Admit(TOKEN.permit, prove(SPEC.id, TOKEN, ME.peer_id)))
    assert ledger.append(ME, Leave(Round(0))).seq == 1
    assert world.ledger(OWNER).append(OWNER, Leave(Round(0))).seq == 0


def test_a_lost_home_gets_its_own_feed_back_long_after(world: World) -> None:
    world.unix_s = NOW + 30 * DAY_S
    ledger = world.ledger()
    ledger.end_bootstrap(OWNER.peer_id)
    assert len(ledger.insert_all(joined(ME), ANN.peer_id).fresh) == 3


def test_an_allowlist_takes_no_permit(world: World) -> None:
    spec = msgspec.structs.replace(SPEC, admission=AdmissionSpec(mode="allowlist", members=(BEN.peer_id,)))

    def one(author: Identity) -> list[Entry]:
        return [sign_entry(spec.id, author, 0, b"", Leave(Round(0)))]

    ledger = world.ledger(spec=spec)
    assert ledger.insert_all(one(BEN), BEN.peer_id).fresh
    assert not ledger.insert_all(one(ANN), BEN.peer_id).fresh
    assert "is not on the list" in ledger.refusal(ANN.peer_id)
    later = sign_entry(spec.id, ANN, 5, one(ANN)[0].id, Leave(Round(0)))
    assert not ledger.insert_all([later], BEN.peer_id).gap, "there is nothing to ask for"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_replicas_with_a_common_member_agree_whatever_the_order(world: World, order: tuple[int, ...]) -> None:
    """One replica heard Ann in time, the other too late; the owner's batches bring both to the same authors."""
    batches = [feed(OWNER, *leaves(2)), joined(ANN), feed(BEN, *leaves(2))]
    early, late = world.member(), world.member()
    early.insert_all(joined(ANN), ANN.peer_id)
    world.unix_s = NOW + 9 * DAY_S
    late.insert_all(joined(ANN), ANN.peer_id)
    for ledger in (early, late):
        for at in order:
            ledger.insert_all(batches[at], OWNER.peer_id)
    assert early.vector() == late.vector()


# --- open runs with a puzzle ------------------------------------------------------------------------

PUZZLED = msgspec.structs.replace(SPEC, admission=AdmissionSpec(puzzle_bits=10))
RULE = Rule(PUZZLED.id, PUZZLED.owner, PUZZLED.admission)


def solution(author: Identity, rule: Rule = RULE) -> Solved:
    *_, found = solutions(rule, author.peer_id)
    assert found is not None
    return Solved(found)


def opened(author: Identity, *bodies: Body) -> list[Entry]:
    entries: list[Entry] = []
    for seq, body in enumerate(bodies):
        entries.append(sign_entry(PUZZLED.id, author, seq, entries[-1].id if entries else b"", body))
    return entries


def test_who_solved_the_puzzle_gets_in_and_nobody_else(world: World) -> None:
    ledger = world.ledger(spec=PUZZLED)
    done = ledger.insert_all(opened(ANN, solution(ANN), *leaves(2)), EVE.peer_id)
    assert (len(done.fresh), done.refused) == (3, ())
    assert ledger.admits(ANN.peer_id)
    for entries in (
        opened(EVE, *leaves(2)),
        opened(EVE, solution(ANN), *leaves(1)),
        opened(EVE, solution(EVE, Rule(SPEC.id, RULE.owner, RULE.admission))),
        opened(EVE, Solved(0)),
        joined(EVE),
    ):
        assert not ledger.insert_all([e for e in entries if e.run == PUZZLED.id], ANN.peer_id).fresh
    assert "admits who solves its puzzle of 10 bits" in ledger.refusal(EVE.peer_id)
    assert not ledger.admits(EVE.peer_id)
    assert ledger.insert_all(opened(OWNER, *leaves(1)), ANN.peer_id).fresh, "the owner needs none"


def test_a_solution_counts_as_the_first_entry_only() -> None:
    with pytest.raises(DecodeError, match="a solution opens a feed"):
        sign_entry(PUZZLED.id, ANN, 1, bytes(32), solution(ANN))


def test_our_own_feed_begins_with_our_solution(world: World) -> None:
    ledger = world.ledger(spec=PUZZLED)
    with pytest.raises(ConfigError, match="puzzle"):
        ledger.append(ME, Leave(Round(0)))
    ledger.append(ME, solution(ME))
    ledger.append(ME, Leave(Round(0)))


def test_each_bit_doubles_the_work_and_the_search_pauses() -> None:
    tries = []
    for number in range(60):
        peer = Identity(bytes([number + 10]) * 32).peer_id
        *pauses, found = solutions(RULE, peer)
        assert is_solved(RULE, peer, found)
        assert pauses == [None] * (found // PUZZLE_SLICE)
        assert not any(is_solved(RULE, peer, nonce) for nonce in range(found))
        tries.append(found + 1)
    assert 2**9 < sum(tries) / len(tries) < 2**11
