"""A node is put back into its run: it goes on with the bits that it had, and says nothing twice."""

import shutil

import pytest
import torch
from msgspec.structs import replace

from atoll.node.checkpoint.local import load_local
from atoll.node.checkpoint.tensorfile import raw
from atoll.node.daemon.assets.feed_recovery import mark_restored, read_mark
from atoll.node.import_export.join_shards import join_shards
from atoll.node.import_export.restore_node import restore_node
from atoll.node.worker.session import Session
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    Counted,
    FinalizeRequest,
    FoldRequest,
    SnapshotRequest,
    StartRequest,
    TrainRequest,
)
from atoll.protocols.run.experts import experts_in
from atoll.protocols.run.run_spec import sign_run
from atoll_bench.experts.experts_members import identity_of
from tests.node.import_export.test_join_shards import RUN, saved, trained
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
DENSE = replace(SPEC, owner=identity_of(0).peer_id)
OVERLAP = replace(DENSE, outer=replace(DENSE.outer, overlap_steps=1))
ME = identity_of(1).peer_id


def checkpoint_of(tmp_path, spec, rounds=1):
    members = trained(tmp_path / "homes", spec, count=2, rounds=rounds)
    return members, join_shards(saved(members, tmp_path / "shards", sign_run(spec, identity_of(0))))


def session(spec, home, peer=ME):
    return Session(StartRequest(codec.encode(spec), peer, str(home), "", 1, "cpu"))


def tensors(spec, home):
    return load_local(home / "state", spec.id).tensors


def payload_of(running, at, experts=b""):
    *_, done = running.train(TrainRequest(Round(at), 1, 2, 2, -1, experts))
    running.close()
    return done.pending.payload


@pytest.mark.parametrize("spec", [DENSE, OVERLAP, RUN], ids=["dense", "overlap", "mixture"])
def test_it_goes_on_with_the_bits_that_it_had(tmp_path, spec):
    members, checkpoint = checkpoint_of(tmp_path, spec, rounds=2)
    found = restore_node(checkpoint, tmp_path / "home", ME)
    assert (found.round, found.state, found.own) == (1, checkpoint.manifest.state, True)
    assert load_local(tmp_path / "home" / "state", spec.id).body.author == ME, "a copy of it sends nothing of ours"
    before, after = tensors(spec, members.home(1)), tensors(spec, tmp_path / "home")
    for name, value in before.items():
        if name == "residual":
            assert value.any()
        if name.partition("/")[0] not in ("local", "anchor"):
            assert (raw(after[name]) == raw(value)).all(), name
    running, old = session(spec, tmp_path / "home"), session(spec, members.home(1))
    assert running.started().state == old.started().state
    assert running.started().experts == old.started().experts == members.shares[1]
    assert payload_of(running, 2, members.shares[1]) == payload_of(old, 2, members.shares[1])


def test_what_was_said_since_is_not_said_again(tmp_path):
    """The node had gone on after it saved: its work is in the others' ledgers, and in a final set."""
    members, checkpoint = checkpoint_of(tmp_path, DENSE)
    sent = [members.contribute(number, 1, b"") for number in range(2)]
    restore_node(checkpoint, tmp_path / "home", ME)
    ask = tuple(each.member for each in sent)
    running = session(DENSE, tmp_path / "home")
    assert running._feedback.residual_C4096.any()
    folded = running.answer(FoldRequest(Round(1), ask))
    assert not running._feedback.residual_C4096.any()
    payload_of(running, 2)
    mine = running._feedback.residual_C4096.clone()
    assert mine.any()
    assert running.answer(FinalizeRequest(Round(1), ask)).state == folded.state
    assert torch.equal(running._feedback.residual_C4096, mine), "what was trained since the restore stays"


def test_it_is_not_said_again_although_its_payload_comes_after_the_next_round(tmp_path):
    """Round 1 is folded without it at first: the node's own feed is then all that tells of it."""
    members, checkpoint = checkpoint_of(tmp_path, DENSE)
    sent = [members.contribute(number, 1, b"") for number in range(2)]

    def next_round(name, said, unsaid=1.0):
        restore_node(checkpoint, tmp_path / name, ME)
        running = session(DENSE, tmp_path / name)
        running.answer(FoldRequest(Round(1), (sent[0].member,)))
        running._feedback.residual_C4096 *= unsaid
        *_, done = running.train(TrainRequest(Round(2), 1, 2, 2, -1, b"", said))
        return running, done.pending.payload

    running, payload = next_round("told", (Round(1),))
    nothing_old, fresh = next_round("nothing unsaid", (), unsaid=0.0)
    assert payload == fresh != next_round("untold", ())[1]
    rest = running._feedback.residual_C4096.clone()
    assert torch.equal(rest, nothing_old._feedback.residual_C4096)
    both = tuple(each.member for each in sent)
    for again in (running, nothing_old):  # told or not: by now this is the rest of round 2
        again.answer(FoldRequest(Round(1), both))
        assert torch.equal(again._feedback.residual_C4096, rest)
        again.close()
    restarted = session(DENSE, tmp_path / "told")
    restarted.answer(FoldRequest(Round(1), both))
    assert torch.equal(restarted._feedback.residual_C4096, rest)


def test_it_may_hear_of_it_by_a_snapshot(tmp_path):
    members, checkpoint = checkpoint_of(tmp_path, DENSE)
    sent = [members.contribute(number, 1, b"") for number in range(2)]
    members.finalize(1, sent)
    with members.session(0) as other:
        snapshot = other.answer(SnapshotRequest(str(tmp_path / "snapshot")))
    for home, included in (("mine", sent[1:]), ("not mine", [])):
        restore_node(checkpoint, tmp_path / home, ME)
        counted = tuple(Counted(each.member.payload, ((0, 1),), Round(1)) for each in included)
        running = session(DENSE, tmp_path / home)
        running.answer(AdoptRequest(Round(1), snapshot.path, snapshot.state, counted))
        assert running._feedback.residual_C4096.any() == (not included)


def test_who_restarts_in_good_order_forgets_nothing(tmp_path):
    """The rule above is for states that are older than what was sent: a usual restart is not."""
    members = trained(tmp_path / "homes", DENSE, count=2, rounds=1)
    sent = [members.contribute(number, 1, b"") for number in range(2)]
    running = session(DENSE, members.home(1))
    before = running._feedback.residual_C4096.clone()
    running.answer(FoldRequest(Round(1), tuple(each.member for each in sent)))
    assert torch.equal(running._feedback.residual_C4096, before)
    (members.home(1) / "spool").joinpath(f"{sent[1].member.payload.hex()}.payload").unlink()
    running = session(DENSE, members.home(1))
    assert running.started().pending == ()
    running.answer(FoldRequest(Round(1), tuple(each.member for each in sent)))
    assert torch.equal(running._feedback.residual_C4096, before), "a payload that the disk lost had left it"


@pytest.mark.parametrize("spec", [DENSE, RUN], ids=["dense", "mixture"])
def test_a_new_identity_is_a_newcomer_with_the_others_moments(tmp_path, spec):
    _, checkpoint = checkpoint_of(tmp_path, spec)
    found = restore_node(checkpoint, tmp_path / "home", identity_of(7).peer_id)
    assert not found.own
    assert read_mark(tmp_path / "home", identity_of(7).peer_id) == (0, {identity_of(0).peer_id, ME})
    state = tensors(spec, tmp_path / "home")
    assert not state["residual"].any()
    moments = {name for name in state if name.startswith("exp_avg/")}
    assert moments
    assert not any(".experts." in name for name in moments)
    assert all(torch.equal(state[name], checkpoint.merged(name)) for name in moments)
    started = session(spec, tmp_path / "home", identity_of(7).peer_id).started()
    assert started.state.hex() == checkpoint.manifest.state
    assert experts_in(started.experts, 8) == (frozenset() if spec is RUN else frozenset(range(8)))


def test_the_mark_says_how_long_the_feed_was(tmp_path):
    members, checkpoint = checkpoint_of(tmp_path, DENSE, rounds=2)
    restore_node(checkpoint, tmp_path / "home", ME)
    ledger = Ledger(members.home(0) / LEDGER_FILE, DENSE.id)
    lost = read_mark(tmp_path / "home", ME)
    assert 0 < lost.entries <= ledger.vector()[ME]
    assert lost.others == {identity_of(0).peer_id}


def test_a_home_that_has_a_state_is_left_alone(tmp_path):
    members, checkpoint = checkpoint_of(tmp_path, DENSE)
    before = sorted(path.name for path in members.home(1).rglob("*"))
    with pytest.raises(ConfigError, match="has the state of round 0") as error:
        restore_node(checkpoint, members.home(1), ME)
    assert "\n" not in error.value.line()
    assert sorted(path.name for path in members.home(1).rglob("*")) == before
    shutil.rmtree(members.home(1) / "state")
    assert restore_node(checkpoint, members.home(1), ME).own


@pytest.mark.parametrize("lost", ["nothing", "ledger", "damaged", "shorter", "marked"])
def test_only_who_lost_its_feed_waits_for_it(tmp_path, lost):
    members, checkpoint = checkpoint_of(tmp_path, DENSE, rounds=2)
    home = members.home(1)
    shutil.rmtree(home / "state")
    match lost:
        case "ledger":
            (home / LEDGER_FILE).unlink()
        case "damaged":
            (home / LEDGER_FILE).write_bytes(b"x" * 9000)
        case "shorter":
            ledger = Ledger(members.home(0) / LEDGER_FILE, DENSE.id)
            older = [entry for entry in ledger.entries() if entry.seq == 0]
            ledger.close()
            (home / LEDGER_FILE).unlink()
            ledger = Ledger(home / LEDGER_FILE, DENSE.id)
            assert ledger.insert_all(older).fresh
            ledger.close()
        case "marked":
            mark_restored(home, 3, [], ME)
    found = restore_node(checkpoint, home, ME)
    assert (read_mark(home, ME) is None) == found.feed == (lost == "nothing")
