"""When a node cuts its ledger: once a summary is old enough, in its own weights too, and only where it may."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.full_summary import Floor, decode_full
from atoll.node.daemon.certificates.history import KEPT_ROUNDS, LedgerHistory, needs_all_records
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.runs.presets import preset
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols.codec import check_types
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, RunId, digest
from atoll.protocols.ledger.records import Ack, Ballot, SummaryProposal, Vote, sign_entry
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.history import HistorySpec
from tests.node.daemon.consensus.epoch_world import World

RUN = RunId(digest(b"run"))
ME = Identity(bytes([9]) * 32)


@pytest.fixture(scope="module")
def states():
    """One node's state after each final round, by round."""
    world, found = World(2, 3), {}
    while len(found) < 40:
        world.step()
        found[world.nodes[0].state.last_final] = world.nodes[0].state
    return found


@pytest.fixture
def ledger(tmp_path: Path):
    opened = Ledger(tmp_path / LEDGER_FILE, RUN)
    for number in range(40):
        opened.append(ME, Ack(Round(number), digest(b"set"), digest(b"state")))
    yield opened
    opened.close()


def rounds(ledger):
    return [entry.body.round for entry in ledger.entries()]


def play(history, states, last, applied_behind=0):
    for number in range(max(0, history.last_gone + 1), last + 1):
        if number in states:
            history.on_final(states[number])
            history.cut(states[number], number - applied_behind)


def test_records_go_once_they_are_old_enough(ledger, states):
    history = LedgerHistory(ledger, keeps_all=False, kept_rounds=10, step_rounds=4)
    play(history, states, 30)
    assert 16 <= history.last_gone <= 20
    assert rounds(ledger) == list(range(history.last_gone + 1, 40))
    again = LedgerHistory(ledger, keeps_all=False)
    assert (again.last_gone, again.authors) == (history.last_gone, tuple(sorted(states[20].accepted)))
    assert again.authors
    assert again.begin(states[0], ()).last_final == history.last_gone


def test_the_weights_of_this_node_must_be_as_far(ledger, states):
    history = LedgerHistory(ledger, keeps_all=False, kept_rounds=10, step_rounds=4)
    play(history, states, 30, applied_behind=100)
    assert rounds(ledger) == list(range(40))
    assert history.cut(states[30], 30)


def test_nothing_goes_before_the_replay_is_over_or_where_all_is_kept(ledger, states):
    history = LedgerHistory(ledger, keeps_all=False, kept_rounds=10, step_rounds=4)
    play(history, {at: replace(state, live=False) for at, state in states.items()}, 30)
    everything = LedgerHistory(ledger, kept_rounds=10, step_rounds=4)
    play(everything, states, 30)
    assert rounds(ledger) == list(range(40))


def test_runs_whose_oldest_sets_still_decide_something_keep_all_records():
    reduced = preset("tiny", ME.peer_id, 1)
    plain = replace(reduced, reduce=None)
    excising = replace(plain, pace=replace(plain.pace, excise_rounds=5))
    excising.check()
    assert [needs_all_records(spec) for spec in (plain, reduced, excising)] == [False, True, True]
    assert not needs_all_records(replace(reduced, history=HistorySpec()))
    audits = [AuditSpec(), AuditSpec(voters=True)]
    assert not any(needs_all_records(replace(plain, audit=audit)) for audit in audits)


def test_records_stay_for_longer_than_audits_look_back():
    """So a node that begins with a summary never needs weights of rounds that its verdicts are missing for."""
    longest = replace(AuditSpec(), memory=256, lag=64)
    check_types(longest)
    assert longest.memory + longest.lag < KEPT_ROUNDS


CERTIFYING = replace(preset("tiny", ME.peer_id, 1), history=HistorySpec(every=8))


def vote_for(ledger, number, name, attempt=0):
    """The owner, who decides alone, proposes this summary and votes for it."""
    ballot, names = Ballot(attempt, ME.peer_id), (digest(b"a"),)
    proposal = ledger.append(ME, SummaryProposal(Round(number), ballot, names, digest(b"state"), name))
    ledger.append(ME, Vote(Round(number), ballot, proposal.id))


def test_a_ledger_is_cut_behind_a_summary_that_others_can_be_convinced_of(tmp_path, states):
    """A node that keeps all makes summaries too: as a voter it needs their names."""
    opened = Ledger(tmp_path / LEDGER_FILE, CERTIFYING.id)
    entries = [opened.append(ME, Ack(Round(number), digest(b"set"), digest(b"state"))) for number in range(40)]
    every, recent = (
        LedgerHistory(opened, keeps_all=keeps_all, kept_rounds=10, step_rounds=4, spec=CERTIFYING)
        for keeps_all in (True, False)
    )
    cuts = []
    for number in sorted(states):
        for history in (every, recent):
            history.on_counted([(ME.peer_id, entries[number].id)] if number >= 0 else [])
            history.on_final(states[number])
        if number in (7, 15, 23):
            made = [history.certify(states[number], ReducerHistory()) for history in (every, recent)]
            assert made[0] == made[1] is not None
            assert every.certify(states[number], None) is None, "a node that cannot know it names none"
            # Of round 15 another summary is certified than this node's, and of round 23 one in a later attempt.
            vote_for(opened, number + 1, made[0] if number != 15 else digest(b"other"), int(number == 23))
        assert not every.cut(states[number], number)
        cuts += [number] if recent.cut(states[number], number) else []
    assert cuts == [17]
    assert recent.last_gone == 7
    assert rounds(opened)[:2] == [7, 8]
    assert [link.name for link in opened.history.links] == [decode_full(opened.history.summary).blob]
    again = LedgerHistory(opened, keeps_all=False, spec=CERTIFYING)
    assert (again.last_gone, again.authors) == (7, tuple(sorted(states[7].accepted)))
    assert decode_full(opened.history.summary).floors == (Floor(ME.peer_id, entries[7].id, ()),)
    # An author of which a final set names what no feed here holds.
    again.on_counted([(ME.peer_id, digest(b"orphan"))])
    assert again.certify(states[30], ReducerHistory()) is None
    # With the proof that it signed two histories it needs no floor.
    twin = sign_entry(CERTIFYING.id, ME, 3, entries[2].id, Ack(Round(3), digest(b"other"), digest(b"state")))
    assert opened.add_proof(entries[3], twin)
    assert again.certify(states[30], ReducerHistory()) is not None
    opened.close()
