"""A chain of links is believed only for a quorum of voters that are known, and the shortest one is kept."""

import contextlib
import random

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.full_summary import FullSummary, encode_full
from atoll.node.daemon.certificates.links import (
    Certified,
    Trusted,
    after,
    check_link,
    check_summary,
    extended,
    owner_of,
)
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.summary import VERSION, summarize
from atoll.node.daemon.consensus.machine import begin
from atoll.node.runs.presets import preset
from atoll.p2p.ledger.history import Link
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, SignatureFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import (
    Ballot,
    Proposal,
    SummaryProposal,
    Vote,
    encode_entry,
    sign_entry,
)
from atoll.protocols.run.sections.history import HistorySpec

EVERY = 8
WHO = [Identity(bytes([number]) * 32) for number in range(1, 9)]
PEERS = [identity.peer_id for identity in WHO]
SPEC = replace(preset("tiny", PEERS[0], 1), history=HistorySpec(every=EVERY))


def full_of(last, voters):
    """A summary of the rounds up to `last` that names these voters."""
    state = begin(SPEC.id, PEERS[0], SPEC.outer.rounds, PEERS[0])
    made = summarize(replace(state, last_final=last, voters=tuple(voters), accepted=frozenset(PEERS)))
    return FullSummary(VERSION, made, (), ReducerHistory())


def certified(full, voters, *, attempt=0, number=None, name=None):
    """The proposal that names this summary, and the votes of these members for it."""
    number = full.summary.round + 1 if number is None else number
    ballot = Ballot(attempt, voters[0].peer_id)
    body = SummaryProposal(
        Round(number), ballot, (digest(b"a"),), digest(b"state"), full.blob if name is None else name
    )
    proposal = sign_entry(SPEC.id, voters[0], 5, digest(b"before"), body)
    return proposal, votes_of(proposal, voters)


def votes_of(proposal, voters):
    vote = Vote(proposal.body.round, proposal.body.ballot, proposal.id)
    return [sign_entry(SPEC.id, voter, 6, digest(b"before"), vote) for voter in voters]


def link_of(proposal, votes):
    return Link(encode_entry(proposal), tuple(encode_entry(vote) for vote in votes))


KNOWN = Trusted(tuple(PEERS[:4]), 8)
FULL = full_of(23, PEERS[1:5])


@pytest.mark.parametrize(("voters", "is_enough"), [(4, True), (3, True), (2, False), (0, False)])
def test_two_thirds_of_the_known_voters_must_have_voted(voters, is_enough):
    proposal, votes = certified(FULL, WHO[:4])
    link = link_of(proposal, votes[:voters])
    if is_enough:
        assert check_link(SPEC, link, KNOWN) == Certified(23, FULL.blob)
    else:
        with pytest.raises(DecodeError, match="quorum"):
            check_link(SPEC, link, KNOWN)


def test_votes_of_strangers_second_votes_and_votes_for_others_do_not_count():
    proposal, votes = certified(FULL, WHO[:4])
    others = votes_of(proposal, WHO[4:8])
    other, for_other = certified(full_of(23, PEERS[4:5]), WHO[:4])
    for wrong in ([*votes[:2], *others], [*votes[:2], votes[0], votes[1]], for_other, [*votes[:2], *for_other]):
        with pytest.raises(DecodeError, match="quorum"):
            check_link(SPEC, link_of(proposal, wrong), KNOWN)
    assert check_link(SPEC, link_of(other, for_other), KNOWN).name != FULL.blob
    forged = codec.decode(encode_entry(votes[2]), type(votes[2]))
    forged = replace(forged, author=PEERS[3])
    with pytest.raises(SignatureFault):
        check_link(SPEC, link_of(proposal, [*votes[:2], forged]), KNOWN)


def test_only_the_first_attempt_of_a_later_round_that_is_due_proves_a_summary():
    for more in ({"attempt": 1}, {"number": 25}, {"number": 8}):
        with pytest.raises(DecodeError, match="names no later summary"):
            check_link(SPEC, link_of(*certified(FULL, WHO[:4], **more)), KNOWN)
    plain = Proposal(Round(24), Ballot(0, PEERS[0]), (digest(b"a"),), digest(b"state"))
    proposal = sign_entry(SPEC.id, WHO[0], 0, b"", plain)
    with pytest.raises(DecodeError, match="names no later summary"):
        check_link(SPEC, link_of(proposal, []), KNOWN)
    unset = replace(SPEC, history=HistorySpec(every=16))
    with pytest.raises(SignatureFault, match="another run"):
        check_link(unset, link_of(*certified(FULL, WHO[:4])), KNOWN)


def test_a_summary_is_of_the_rounds_that_its_link_says():
    assert check_summary(SPEC, Certified(23, FULL.blob), encode_full(FULL)) == FULL
    with pytest.raises(DecodeError, match="other rounds"):
        check_summary(SPEC, Certified(31, FULL.blob), encode_full(FULL))


def walk(chain):
    """What a newcomer finds that knows the owner only."""
    trusted, last = owner_of(SPEC), -1
    for link in chain:
        found = check_link(SPEC, link.link, trusted)
        full = check_summary(SPEC, found, link.summary)
        assert found.name == link.name == full.blob
        trusted, last = after(full), found.last
    return last


def test_a_chain_is_as_short_as_those_that_stayed_allow():
    # The owner votes up to round 16; then one of four goes with each summary.
    eras = [(7, WHO[0:4]), (15, WHO[0:4]), (23, WHO[1:5]), (31, WHO[2:6]), (39, WHO[3:7]), (47, WHO[4:8])]
    chain, lengths = (), []
    for (last, voters), (_, nexts) in zip(eras, [*eras[1:], eras[-1]], strict=True):
        full = full_of(last, [each.peer_id for each in nexts])
        proposal, votes = certified(full, voters)
        chain = extended(SPEC, chain, proposal, votes, encode_full(full))
        assert chain is not None
        assert walk(chain) == last
        lengths.append(len(chain))
        assert all(len(link.link.votes) <= 3 for link in chain), "no more than a quorum"
    assert lengths == [1, 1, 2, 2, 3, 3], "each link skips one of them"
    # Where the old members return, what lies between goes.
    full = full_of(55, PEERS[:4])
    assert len(extended(SPEC, chain, *certified(full, WHO[:4]), encode_full(full))) == 1


def test_where_too_few_stayed_there_is_no_link():
    full = full_of(7, PEERS[:4])
    chain = extended(SPEC, (), *certified(full, WHO[:4]), encode_full(full))
    later = full_of(15, PEERS[4:])
    assert extended(SPEC, chain, *certified(later, [*WHO[2:4], *WHO[4:]]), encode_full(later)) is None
    assert extended(SPEC, chain, *certified(later, [*WHO[1:4], *WHO[4:]]), encode_full(later)) is not None


def test_changed_bytes_prove_nothing_else():
    """The contract of decoders: a value or one of our errors. And never another summary."""
    link = link_of(*certified(FULL, WHO[:3]))
    rng = random.Random(1)
    for _ in range(300):
        parts = [bytearray(link.proposal), *map(bytearray, link.votes)]
        part = rng.choice(parts)
        part[rng.randrange(len(part))] = rng.randrange(256)
        with contextlib.suppress(DecodeError, SignatureFault):
            found = check_link(SPEC, Link(bytes(parts[0]), tuple(map(bytes, parts[1:]))), KNOWN)
            assert found == Certified(23, FULL.blob)
