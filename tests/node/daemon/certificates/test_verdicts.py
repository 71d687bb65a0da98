"""A chain that goes on from a summary at every round has the same deciders as one that has all verdicts."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.daemon.certificates import full_summary, history
from atoll.node.daemon.certificates.full_summary import AuditedFullSummary, SummaryMaker, decode_full, encode_full
from atoll.node.daemon.certificates.links import Certified, check_summary
from atoll.node.daemon.certificates.reducers import ReducerHistory
from atoll.node.daemon.certificates.summary import (
    check_sizes,
    decode_summary,
    encode_summary,
    resumed,
    summarize,
)
from atoll.node.daemon.consensus.chains.epochs import Electorate, Segment
from atoll.node.daemon.consensus.machine import begin
from atoll.node.runs.guard import guarded
from atoll.node.runs.presets import preset
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols import codec
from atoll.protocols.audits.shown_work import first_tally
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import digest, peer_id_of
from tests.protocols.audits.test_shown_work import MEMBERS, NOISE, OWNER, Chain, Run

SPEC = replace(guarded(preset("tiny", peer_id_of(bytes(32)), 1)), owner=OWNER)


def spec_of(chain):
    audit = replace(SPEC.audit, memory=chain.tally.memory)
    return replace(SPEC, audit=audit, pace=replace(SPEC.pace, probation=chain.tally.probation))


def state_of(run, *segments, spec=SPEC):
    """The state of a node after the final sets of a run."""
    state = begin(spec.id, OWNER, spec.outer.rounds, OWNER, tally=run.tally)
    voters = tuple(sorted(run.voters))
    return replace(state, last_final=run.tally.rounds - 1, voters=voters, chain=(*state.chain, *segments))


@settings(deadline=None)
@given(st.data(), st.integers(4, 12))
def test_a_chain_goes_on_from_a_summary_at_any_round_as_from_all_records(data, memory):
    """`Chain` compares the deciders of each round with those that all verdicts name."""
    chain, segments = Chain(data, memory), []
    spec = spec_of(chain)
    first = begin(spec.id, OWNER, spec.outer.rounds, OWNER, tally=first_tally(spec))
    for number in range(40):
        if number and chain.rng.random() < 0.05:
            place = Electorate(tuple(sorted(chain.voters)), frozenset(MEMBERS))
            segments.append(Segment(digest(bytes([number])), number, place, chain.tally.at_fork))
        chain.go_on()
        state = state_of(chain, *segments, spec=spec)
        summary = decode_summary(encode_summary(summarize(state)))
        check_sizes(spec, summary)
        again = resumed(first, summary, None)
        assert (again.tally, again.chain) == (chain.tally, state.chain)
        chain.tally = again.tally


@pytest.fixture(scope="module")
def full():
    """A summary with verdicts on noise, and with some that are awaited."""
    run = Run(1)
    for number in range(20):
        run.final(*MEMBERS[:4], *(NOISE if number > 15 else ()))
    made = SummaryMaker(None).make(state_of(run), ReducerHistory())
    assert isinstance(made, AuditedFullSummary)
    (verdicts,) = made.summary.verdicts
    assert all((verdicts.shown, verdicts.asked, verdicts.found, verdicts.awaited))
    return made


def served(full, verdicts=(), spec=SPEC):
    """What a newcomer makes of a summary with other verdicts."""
    summary = replace(full.summary, verdicts=verdicts or full.summary.verdicts)
    data = encode_full(replace(full, summary=summary))
    return check_summary(spec, Certified(full.summary.round, full.blob), data)


def test_verdicts_that_no_final_sets_say_are_refused(full):
    assert served(full) == full
    (good,) = full.summary.verdicts
    rounds, members = full.summary.round + 1, len(full.summary.tally.counts)
    many = good.found[:1] * (SPEC.audit.memory * SPEC.audit.per_round * members + 1)
    for wrong, why in (
        (replace(good, shown=(*good.shown, members)), "no final set"),
        (replace(good, asked=((members, 3),)), "no final set"),
        (replace(good, found=((3, members, 0, 1),)), "no final set"),
        (replace(good, awaited=((3, 0, members, digest(b"x")),)), "no final set"),
        (replace(good, asked=((0, rounds),)), "not looked back at"),
        (replace(good, found=((rounds, 0, 1, 1),)), "not looked back at"),
        (replace(good, found=many), "more verdicts"),
    ):
        with pytest.raises(DecodeError, match=why):
            served(full, (wrong,))
    short = replace(SPEC, audit=replace(SPEC.audit, memory=4))
    old = [replace(good, found=((number, 0, 1, 1),), asked=(), awaited=()) for number in (16, 15)]
    served(full, (old[0],), short)
    with pytest.raises(DecodeError, match="not looked back at"):
        served(full, (old[1],), short)
    with pytest.raises(DecodeError, match="of an epoch"):
        served(full, (good, good))
    for field, value in (("shown", (-1,)), ("found", ((3, 0, 1, 97),)), ("awaited", ((3, 0, 1, b"x"),))):
        with pytest.raises(DecodeError):
            served(full, (replace(good, **{field: value}),))


def test_a_summary_is_of_the_kind_that_its_run_has(full):
    without = replace(SPEC, audit=None)
    with pytest.raises(DecodeError, match="no such summaries"):
        served(full, spec=without)
    plain = summarize(replace(state_of(Run(1)), last_final=full.summary.round, tally=first_tally(without)))
    with pytest.raises(DecodeError, match="no such summaries"):
        check_sizes(SPEC, plain)
    check_sizes(without, plain)
    with pytest.raises(DecodeError, match="two versions"):
        decode_full(codec.encode(replace(full, summary=replace(full.summary, version=1))))


def test_no_node_makes_a_summary_that_none_reads(monkeypatch, full, tmp_path):
    run = Run(1)
    run.final(*MEMBERS[:4])
    state, maker = state_of(run), SummaryMaker(None)
    size_bytes = len(encode_full(maker.make(state, ReducerHistory())))
    monkeypatch.setattr(full_summary, "MAX_BYTES", size_bytes)
    assert maker.make(state, ReducerHistory()) is not None
    monkeypatch.setattr(full_summary, "MAX_BYTES", size_bytes - 1)
    assert maker.make(state, ReducerHistory()) is None
    ledger = Ledger(tmp_path / LEDGER_FILE, SPEC.id)
    own = history.LedgerHistory(ledger, keeps_all=False, step_rounds=1)
    monkeypatch.setattr(history, "MAX_BYTES", 99)
    own.on_final(state)
    assert not own._made
    monkeypatch.undo()
    own.on_final(state)
    assert own._made
    ledger.close()
