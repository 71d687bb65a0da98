"""Which entries count in a run: here, whose exclusions do."""

import pytest
from msgspec.structs import replace

from atoll.node.runs.presets import preset
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import (
    Ballot,
    Excise,
    Excised,
    ExcisingProposal,
    Exclude,
    ExcludingProposal,
    SummaryProposal,
    sign_entry,
)
from atoll.protocols.run.sections.history import HistorySpec

OWNER, ANN, BEN = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
SPEC = preset("tiny", OWNER.peer_id, 1)


@pytest.mark.parametrize(
    ("author", "peer", "counts"),
    [(OWNER, ANN, True), (ANN, BEN, True), (ANN, ANN, False), (OWNER, OWNER, False), (ANN, OWNER, False)],
)
def test_nobody_excludes_the_owner_or_itself(author, peer, counts):
    entry = sign_entry(SPEC.id, author, 0, b"", Exclude(Round(3), peer.peer_id, ""))
    assert is_lawful(SPEC, entry) == counts


EXCISING = replace(SPEC, pace=replace(SPEC.pace, excise_rounds=4))


@pytest.mark.parametrize(
    ("author", "peer", "counts"), [(OWNER, ANN, True), (ANN, BEN, True), (ANN, ANN, False), (ANN, OWNER, False)]
)
def test_work_is_taken_out_only_in_runs_that_keep_payloads_and_never_the_owners(author, peer, counts):
    entry = sign_entry(EXCISING.id, author, 0, b"", Excise(Round(3), peer.peer_id, "", Round(1)))
    assert is_lawful(EXCISING, entry) == counts
    assert not is_lawful(SPEC, entry)


@pytest.mark.parametrize(
    ("peer", "since", "counts"), [(ANN, 4, True), (ANN, 7, True), (ANN, 3, False), (OWNER, 7, False)]
)
def test_a_proposal_takes_out_only_what_nodes_keep_the_payloads_of(peer, since, counts):
    names, state = (digest(b"a"),), digest(b"state")
    excised = (Excised(peer.peer_id, Round(since)),)
    body = ExcisingProposal(Round(8), Ballot(0, BEN.peer_id), names, state, excised)
    entry = sign_entry(EXCISING.id, BEN, 0, b"", body)
    assert is_lawful(EXCISING, entry) == counts
    assert not is_lawful(SPEC, entry)


@pytest.mark.parametrize(("peer", "counts"), [(ANN, True), (BEN, True), (OWNER, False)])
def test_no_proposal_excludes_the_owner(peer, counts):
    body = ExcludingProposal(Round(8), Ballot(0, BEN.peer_id), (digest(b"a"),), digest(b"state"), (peer.peer_id,))
    assert is_lawful(SPEC, sign_entry(SPEC.id, BEN, 0, b"", body)) == counts


CERTIFYING = replace(SPEC, history=HistorySpec(every=8))


@pytest.mark.parametrize(
    ("number", "attempt", "counts"), [(8, 0, True), (16, 0, True), (8, 1, False), (9, 0, False), (0, 0, False)]
)
def test_a_summary_is_named_in_the_first_attempt_of_the_rounds_that_are_due(number, attempt, counts):
    names, name = (digest(b"a"),), digest(b"summary")
    body = SummaryProposal(Round(number), Ballot(attempt, BEN.peer_id), names, digest(b"state"), name)
    entry = sign_entry(CERTIFYING.id, BEN, 0, b"", body)
    assert is_lawful(CERTIFYING, entry) == counts
    assert not is_lawful(SPEC, entry)
