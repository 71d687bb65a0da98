"""Proofs of two histories reach whoever needs them, also without the feed; what is no proof changes nothing."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atoll.p2p.ledger import proofs
from atoll.p2p.ledger.history import Cut
from atoll.p2p.ledger.newcomers import NewcomerQuota, Newcomers
from atoll.p2p.ledger.proofs import contradicts
from atoll.p2p.ledger.store import CLOSED, Ledger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import encode_entry
from tests.p2p.exchange.test_sync import AUTHORS, RUN, feed

LIAR, HONEST = AUTHORS[0], AUTHORS[1]
CROWD = [Identity(random.Random(number).randbytes(32)) for number in range(40)]
ONE, TWO = feed(LIAR, 4), feed(LIAR, 4, first_round=50)


def ledger_in(path: Path, *accepted: Identity) -> Ledger:
    """A ledger with a budget of newcomers, in which these authors are accepted."""
    newcomers = Newcomers(NewcomerQuota(), lambda: 0.0)
    opened = Ledger(path / "ledger.sqlite", RUN, newcomers=newcomers)
    newcomers.accept([author.peer_id for author in accepted], by_work=False)
    newcomers.is_replaying = False
    return opened


@pytest.fixture
def ledger(tmp_path: Path):
    opened = ledger_in(tmp_path, LIAR, HONEST)
    yield opened
    opened.close()


def test_a_proof_ends_a_feed_that_a_summary_stands_for(ledger: Ledger, tmp_path: Path) -> None:
    """A newcomer has no feed of an author without a floor: the proof comes all the same, and then its entries."""
    assert ledger.add_proof(ONE[1], TWO[1])
    assert ledger.equivocators() == {LIAR.peer_id}
    assert ledger.wanted() == {LIAR.peer_id: CLOSED}, "nobody sends the feed"
    assert not ledger.insert_all(ONE).fresh
    assert ledger.add_orphans([ONE[3], TWO[3]]) == (ONE[3], TWO[3]), "what sets name comes by name"
    ledger.close()
    again = ledger_in(tmp_path, HONEST)
    assert (again.equivocators(), again.wanted()) == ({LIAR.peer_id}, {LIAR.peer_id: CLOSED})
    again.close()


def test_of_an_author_that_nothing_names_it_is_not_stored(tmp_path: Path) -> None:
    opened = ledger_in(tmp_path, HONEST)
    assert not opened.add_proof(ONE[1], TWO[1])
    opened.close()


def test_an_excluded_author_is_proven_too(ledger: Ledger) -> None:
    """Else nodes would differ for good about whose floors a summary has."""
    ledger.insert_all(ONE)
    ledger.exclude(LIAR.peer_id, "")
    assert ledger.add_proof(ONE[1], TWO[1])
    assert ledger.wanted() == {LIAR.peer_id: CLOSED}


def test_entries_of_honest_authors_prove_nothing_however_they_are_paired(ledger: Ledger) -> None:
    honest, other = feed(HONEST, 4), feed(AUTHORS[2], 4)
    ledger.insert_all(honest)
    for first, second in product([*honest, *other, *ONE], [*honest, *other]):
        assert not contradicts(first, second)
        assert not ledger.add_proof(first, second)
    assert ledger.equivocators() == frozenset()
    assert len(ledger.insert_all(feed(HONEST, 6)[4:]).fresh) == 2, "it goes on"


def test_two_made_up_identities_keep_back_no_proof_that_matters(tmp_path: Path) -> None:
    """A peer takes no proofs against authors that it does not know, and is offered two at a time."""
    opened = ledger_in(tmp_path, LIAR)
    made_up = [Identity(random.Random(number).randbytes(32)) for number in range(8)]
    for author in [*made_up, LIAR]:
        opened.insert_all(feed(author, 1))
        opened.insert_all(feed(author, 1, first_round=50))
    assert sum(author.peer_id < LIAR.peer_id for author in made_up) >= 2, "by name it would come later"
    assert len(opened.equivocators()) == len(made_up) + 1
    (first, second) = offered(opened)
    assert opened.proof(LIAR.peer_id) == first != second
    assert LIAR.peer_id not in {*map(_author, offered(opened, [LIAR.peer_id]))}
    seen = {proof for number in range(200) for proof in offered(opened, number=number)}
    assert len(seen) == len(made_up) + 1, "those that come after the first have their turns"
    opened.close()


def offered(ledger: Ledger, named: Sequence[PeerId] = (), number: int = 0) -> list[tuple[bytes, bytes]]:
    return ledger.proofs_for(ledger.lacked_proofs({}, named), random.Random(number))


def test_whose_feed_a_peer_goes_on_with_is_proven_first(tmp_path: Path) -> None:
    """Hundreds of equivocators that worked as long, and longer, keep back no proof against a member."""
    opened = ledger_in(tmp_path, *CROWD)
    for author in CROWD:
        opened.insert_all(feed(author, 1))
        opened.insert_all(feed(author, 1, first_round=50))
    names = sorted(author.peer_id for author in CROWD)
    opened.newcomers.accept(names[:-1])
    member = names[-1]
    lacking = opened.lacked_proofs(dict.fromkeys(names, CLOSED) | {member: 1}, ())
    assert (lacking.in_use, len(lacking.others)) == ({member}, len(names) - 1)
    assert opened.proofs_for(lacking, random.Random(1))[0] == opened.proof(member)
    opened.close()


def test_of_those_the_peer_goes_on_with_who_worked_most_is_proven_first(tmp_path: Path) -> None:
    opened = ledger_in(tmp_path, *CROWD)
    for author in CROWD:
        opened.insert_all(feed(author, 1))
        opened.insert_all(feed(author, 1, first_round=50))
    member = max(author.peer_id for author in CROWD)
    opened.newcomers.accept([member])
    lacking = opened.lacked_proofs({author.peer_id: 1 for author in CROWD}, ())
    assert opened.proofs_for(lacking, random.Random(1))[0] == opened.proof(member)
    opened.close()


PEERS = [PeerId(f"peer-{number:02}") for number in range(40)]
NAMES = st.frozensets(st.sampled_from(PEERS))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NAMES, NAMES, st.integers(0, 1000))
@example(frozenset(PEERS), frozenset(PEERS[10:16]), 0)
def test_a_part_of_the_names_shows_what_a_peer_lacks_and_nothing_that_it_has(ours, theirs, seed) -> None:
    """Whatever both have: no message offers what is there, and some message shows each that is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "NAMED", 6)
        here, there, rng = proofs.ProofTable(None), proofs.ProofTable(None), random.Random(seed)
        seen = set[PeerId]()
        for _ in range(300):
            named = there.named(set(theirs), rng)
            assert len(named) <= 6
            lacking = here.lacking(set(ours), named, in_use=set())
            seen |= lacking.others
            assert not lacking.in_use
        assert seen == ours - theirs
        assert here.lacking(set(ours), named, set(ours - theirs)).in_use == ours - theirs


def _author(proof: tuple[bytes, bytes]) -> str:
    return next(a for a in (LIAR.peer_id, HONEST.peer_id, "") if a.encode() in proof[0])


def test_records_of_a_summary_that_contradict_the_feed_here_are_a_proof(ledger: Ledger) -> None:
    """Its other history has the same length: no exchange would show it."""
    ledger.insert_all([*feed(HONEST, 4), *ONE])
    floors = {HONEST.peer_id: feed(HONEST, 4)[3].id, LIAR.peer_id: TWO[3].id}
    ledger.cut(Cut(b"summary", 60, (), floors), [*feed(HONEST, 4), *TWO])
    assert ledger.equivocators() == {LIAR.peer_id}
    assert ledger.proof(LIAR.peer_id) == (encode_entry(ONE[0]), encode_entry(TWO[0]))
    assert ledger.entries(author=LIAR.peer_id) == ONE, "the feed stays what it is"
