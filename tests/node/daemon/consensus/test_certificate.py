"""A proof of finality: entries from which anybody who has the RunSpec sees that a round is final."""

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates import certificate as final_proof
from atoll.node.daemon.certificates.certificate import PROOF_MAX_BYTES, FinalProof, gather, proven
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import (
    MAX_SET,
    Ballot,
    Contribution,
    Epoch,
    Proposal,
    Vote,
    decode_entry,
    encode_entry,
    epoch_id,
    sign_entry,
)
from atoll_bench.experts.experts_ledger import Peer, decide
from atoll_bench.experts.experts_members import identity_of
from tests.node.worker.session_home import SPEC

PEERS = [identity_of(number) for number in range(5)]
RUN = replace(SPEC, owner=PEERS[0].peer_id)
STATES = [digest(b"state", bytes([at])) for at in range(3)]
GOLDEN = "15338dc4380cc661f19472c6776208fd01eff754b9b473620844268ab8fb5801"


def contribution(at, number):
    return PEERS[number].peer_id, Contribution(Round(at), STATES[0], digest(bytes([at, number])), 1, 64, 1, 2.0)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """Of a run of three rounds: all of 0 … 3, then 1 … 3, then 1 … 4."""
    folder = tmp_path_factory.mktemp("ledger")
    peers = [Peer(identity, folder / str(number)) for number, identity in enumerate(PEERS)]
    for at, who in enumerate(((0, 1, 2, 3), (1, 2, 3), (1, 2, 3, 4))):
        decide(RUN, peers, at, [contribution(at, number) for number in who], STATES[at])
    ledger = Ledger(folder / "3" / LEDGER_FILE, RUN.id)
    yield ledger
    ledger.close()


def proof_of(ledger, last):
    return gather(RUN, last, lambda at: ledger.entries(number=at))


def rounds_of(data):
    return [list(one) for one in codec.decode(data, FinalProof, max_bytes=PROOF_MAX_BYTES).rounds]


def remade(rounds):
    return codec.encode(FinalProof(final_proof.VERSION, tuple(map(tuple, rounds)), ()))


def kind(entry):
    return type(decode_entry(entry, RUN.id).body)


@pytest.mark.parametrize(
    ("last", "newest", "members"),
    [
        (0, 1, (0, 1, 2, 3)), (1, 1, (1, 2, 3)), (2, 1, (1, 2, 3, 4)), (1, 2, (0, 1, 2, 3)),
        (2, 2, (1, 2, 3, 4)), (2, 16, (0, 1, 2, 3, 4)),
    ],
)  # fmt: skip
def test_it_says_round_state_and_members(ledger, last, newest, members, monkeypatch):
    monkeypatch.setattr(final_proof, "MEMBER_ROUNDS", newest)
    found = proven(RUN, proof_of(ledger, last))
    assert (found.round, found.state) == (last, STATES[last])
    assert found.members == tuple(sorted(PEERS[number].peer_id for number in members))
    assert len(found.known) == (5 if last == 2 else 4)
    assert found.needed == {5: 4, 4: 3, 3: 2}[len(members)]


def test_it_has_no_more_votes_than_are_needed(ledger):
    votes = [sum(kind(entry) is Vote for entry in one) for one in rounds_of(proof_of(ledger, 2))]
    assert votes == [1, 3, 2]


def test_rounds_that_the_run_does_not_have_and_entries_without_end_are_refused(ledger):
    rounds = rounds_of(proof_of(ledger, 2))
    with pytest.raises(DecodeError, match="the run's rounds"):
        proven(replace(RUN, outer=replace(RUN.outer, rounds=2)), remade(rounds))
    many = 5 * MAX_SET // 2 // len(rounds[0])
    with pytest.raises(DecodeError, match="more entries than round 0 has"):
        proven(RUN, remade([rounds[0] * many, *rounds[1:]]))
    with pytest.raises(DecodeError, match="of length"):
        proven(RUN, remade([rounds[0] * 2 * many, *rounds[1:]]))


@pytest.mark.parametrize("what", [Proposal, Vote, Contribution])
def test_what_no_feed_holds_proves_too(ledger, what):
    """The entry of an author with two histories, fetched by name (p2p/exchange/orphans.py)."""
    at = 1
    decided = next(
        decode_entry(data, RUN.id) for data in rounds_of(proof_of(ledger, at))[at] if kind(data) is what
    )
    votes = [entry for entry in ledger.entries(number=at) if isinstance(entry.body, Vote)]
    orphans = votes if what is Vote else [decided]

    def feeds(number):
        return [entry for entry in ledger.entries(number=number) if entry not in orphans]

    with pytest.raises(ConfigError, match="does not prove"):
        gather(RUN, at, feeds)
    liars = frozenset(entry.author for entry in orphans)
    data = gather(
        RUN,
        at,
        feeds,
        orphans_of=lambda number: [e for e in orphans if e.body.round == number],
        equivocators=liars,
    )
    assert proven(RUN, data).state == STATES[at]


def test_golden(ledger):
    assert digest(proof_of(ledger, 2)).hex() == GOLDEN


@pytest.mark.parametrize("missing", [Proposal, Vote, Contribution])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nothing_of_it_can_be_left_out(ledger, at, missing):
    rounds = rounds_of(proof_of(ledger, 2))
    rounds[at].remove(next(entry for entry in rounds[at] if kind(entry) is missing))
    with pytest.raises(DecodeError, match=f"round {at} is final"):
        proven(RUN, remade(rounds))


def test_votes_of_others_than_the_deciders_do_not_count(ledger):
    """The first owner left after round 0: with its friends it cannot decide round 2."""
    rounds = rounds_of(proof_of(ledger, 2))
    deciders = voter_order(RUN.id, 2, [PEERS[number].peer_id for number in (1, 2, 3)])
    lie = Proposal(Round(2), Ballot(0, deciders[0]), names_in(rounds[2]), Digest(bytes(32)))
    proposer = next(peer for peer in PEERS if peer.peer_id == deciders[0])
    proposed = sign_entry(RUN.id, proposer, 99, bytes(32), lie)
    votes = [
        sign_entry(RUN.id, peer, 99, bytes(32), Vote(Round(2), lie.ballot, proposed.id))
        for peer in (PEERS[0], PEERS[4], proposer)
    ]
    rounds[2] = [e for e in rounds[2] if kind(e) is Contribution] + [encode_entry(e) for e in (proposed, *votes)]
    with pytest.raises(DecodeError, match="round 2 is final"):
        proven(RUN, remade(rounds))


def entry_of(peer, body):
    return sign_entry(RUN.id, peer, 50, bytes(32), body)


def epoch_proof(members, signers, at=3, parent=b"", deciders=None):
    """A certificate of four rounds: the last one is decided in an epoch. With the last of its epochs' entries."""
    body = Epoch(Round(at), parent, tuple(sorted(peer.peer_id for peer in members)))
    by_name = {peer.peer_id: peer for peer in PEERS}
    voters = voter_order(RUN.id, at, body.members)
    ballot = Ballot(0, voters[0], epoch_id(body))
    author, work = contribution(at, int(PEERS.index(by_name[voters[0]])))
    said = entry_of(by_name[author], work)
    lie = Proposal(Round(at), ballot, (said.id,), digest(b"end"))
    proposed = entry_of(by_name[voters[0]], lie)
    given = [entry_of(peer, Vote(Round(at), ballot, proposed.id)) for peer in deciders or members]
    last = [encode_entry(entry) for entry in (said, proposed, *given)]
    signed = tuple(encode_entry(entry_of(peer, body)) for peer in sorted(signers, key=lambda peer: peer.peer_id))
    return last, signed


def with_epoch(ledger, last, signed):
    rounds = [*rounds_of(proof_of(ledger, 2)), last]
    return codec.encode(FinalProof(final_proof.VERSION, tuple(map(tuple, rounds)), (signed,)))


def test_a_round_that_an_epoch_decided_is_proven_through_it(ledger):
    found = proven(RUN, with_epoch(ledger, *epoch_proof(PEERS[1:3], PEERS[1:3])))
    assert (found.round, found.state, found.epochs) == (3, digest(b"end"), 1)
    assert proven(RUN, proof_of(ledger, 2)).epochs == 0


def test_an_epoch_needs_the_signatures_of_all_its_members(ledger):
    last, signed = epoch_proof(PEERS[1:3], PEERS[1:2])
    with pytest.raises(DecodeError, match="not all of its members"):
        proven(RUN, with_epoch(ledger, last, signed))


def test_an_epoch_of_strangers_proves_nothing(ledger):
    """A run whose last round has a single author is that one's; but not anybody's."""
    stranger = identity_of(77)
    PEERS.append(stranger)
    try:
        data = with_epoch(ledger, *epoch_proof([stranger], [stranger]))
    finally:
        PEERS.remove(stranger)
    with pytest.raises(DecodeError, match="neither a voter"):
        proven(RUN, data)


def names_in(entries):
    return next(decode_entry(e, RUN.id).body.contributions for e in entries if kind(e) is Proposal)


def test_another_runs_entries_and_changed_ones_are_refused(ledger):
    rounds = rounds_of(proof_of(ledger, 2))
    with pytest.raises(SignatureFault, match="another run"):
        proven(replace(RUN, name="other"), remade(rounds))
    rounds[1][0] = rounds[1][0][:-1] + bytes([rounds[1][0][-1] ^ 1])
    with pytest.raises(SignatureFault):
        proven(RUN, remade(rounds))
    for data in (b"", b"\x92\x02\x90", codec.encode(FinalProof(3, (), ())), codec.encode(FinalProof(2, (), ()))):
        with pytest.raises(DecodeError):
            proven(RUN, data)


def test_a_ledger_that_proves_less_says_what_to_do(ledger):
    with pytest.raises(ConfigError, match="does not prove that round 3 is final"):
        proof_of(ledger, 3)
