"""The worker's session: a restart at any stage gives the same state, a full disk loses nothing, and work that
missed its final set returns to the error feedback exactly once."""

import contextlib
import errno
import math
import os
import shutil
import threading
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint.local import load_local
from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.worker.folding import fold_requests
from atoll.node.worker.round_trainer import weight_of
from atoll.node.worker.schedule.time_account import TimeAccount
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_bytes
from atoll.protocols.errors import (
    AtollError,
    ConfigError,
    CorruptFault,
    DecodeError,
    DiskFault,
    OtherChain,
    Superseded,
)
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    CheckRequest,
    Counted,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    Pending,
    SaveRequest,
    SnapshotRequest,
    StartRequest,
    TrainProgress,
    TrainRequest,
)
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.model_spec import atoms
from tests.node.worker.session_home import ME, OTHER, OVERLAPPING, SPEC, Home, blocked, member, said
from tests.waiting import HANGS_S, poll


@pytest.fixture
def homes(tmp_path: Path) -> Callable[[str], Home]:
    return lambda name, peer=ME, spec=SPEC: Home(tmp_path / name, peer, spec)


def test_a_restart_at_every_stage_gives_the_state_of_a_node_that_never_stopped(homes):
    other = homes("other", OTHER)
    steady, shaken = homes("steady"), homes("shaken")
    for number in range(3):
        theirs = member(other.train(number).pending, OTHER)
        views, finals = [], []
        for node in (steady, shaken):
            pending = node.train(number).pending
            if node is shaken:
                started = node.restart()
                assert [p.payload for p in started.pending] == [pending.payload]
                assert started.final == number - 1
            members = (member(pending), theirs)
            views.append(node.ask(FoldRequest(Round(number), members)).state)
            if node is shaken:
                node.restart()
                assert node.ask(FoldRequest(Round(number), members)).state == views[-1]
            check = node.ask(CheckRequest(Round(number), members)).state
            finals.append(node.ask(FinalizeRequest(Round(number), members)).state)
            assert check == finals[-1] == views[-1]
            if node is shaken:
                started = node.restart()
                assert (started.final, started.state, started.pending) == (number, finals[-1], ())
        assert views[0] == views[1]
        assert finals[0] == finals[1]
        other.ask(FinalizeRequest(Round(number), (theirs,)))
    assert torch.equal(steady.residual(), shaken.residual())


def test_first_values_are_made_where_no_saved_state_has_later_ones(homes, monkeypatch):
    """Of a large model that is seconds of CPU, and a file of its size, at each start."""
    made = []
    genesis_atom = fold_requests.genesis_atom
    monkeypatch.setattr(fold_requests, "genesis_atom", lambda *of: (made.append(of), genesis_atom(*of))[1])
    home = homes("home")
    first = home.session.started()
    assert (len(made), first.final) == (len(atoms(SPEC.model)), -1)
    pending = home.train(0).pending
    assert (home.restart().state, home.restart().final) == (first.state, -1)
    state = home.ask(FinalizeRequest(Round(0), (member(pending),))).state
    started = home.restart()
    assert (started.final, started.state, len(made)) == (0, state, len(atoms(SPEC.model)))


def test_work_in_the_final_set_is_sent_and_work_outside_it_returns_once(homes):
    node, other = homes("a"), homes("b", OTHER)
    kept, missed = node.train(0).pending, node.train(1).pending
    before, payload = node.residual(), said(missed, node.residual())
    theirs = member(other.train(1).pending, OTHER)
    node.ask(FinalizeRequest(Round(0), (member(kept),)))
    assert torch.equal(node.residual(), before)
    node.ask(FinalizeRequest(Round(1), (theirs,)))
    assert torch.equal(node.residual(), before + payload)
    assert node.restart().pending == ()
    assert torch.equal(node.residual(), before + payload)


def test_a_home_that_was_moved_has_its_pending_work(homes):
    """A saved state named files by whole paths: at another one, announced work was called sent, and was lost."""
    node, other = homes("a"), homes("b", OTHER)
    missed = node.train(0).pending
    before, payload = node.residual(), said(missed, node.residual())
    moved = node.path.rename(node.path.with_name("moved"))
    node.path, node.start = moved, msgspec.structs.replace(node.start, home=str(moved))
    (pending,) = node.restart().pending
    assert Path(pending.path).parent == moved / Path(missed.path).parent.name
    node.ask(FinalizeRequest(Round(0), (member(other.train(0).pending, OTHER),)))
    assert torch.equal(node.residual(), before + payload)


@pytest.mark.parametrize("spec", [SPEC, OVERLAPPING], ids=["plain", "overlap"])
def test_a_copied_home_under_another_identity_sends_nothing_of_the_others_work(tmp_path, spec, caplog):
    """Both started: what the one had yet to send went into the model twice."""
    node = Home(tmp_path / "a", spec=spec)
    for number in range(2):
        node.train(number)
    node.session.close()
    shutil.copytree(node.path, tmp_path / "b")
    copied = Home(tmp_path / "b", OTHER, spec)
    assert "the saved state is of" in caplog.text
    assert (copied.session.started().pending, copied.session._feedback.past) == ((), ())
    assert not copied.session._feedback.residual_C4096.any()
    assert torch.equal(copied.session._fold.final_C4096, node.session._fold.final_C4096)
    copied.train(2)
    assert copied.restart().pending, "its own work is its own"
    again = node.restart()
    assert [one.round for one in again.pending] == [0, 1]
    assert node.session._feedback.residual_C4096.any()


def test_another_payload_of_the_same_round_does_not_count_as_sent(homes):
    """After an older generation was loaded a round may have been trained twice; one of them was announced."""
    node, other = homes("a"), homes("b", OTHER)
    mine = node.train(0).pending
    before, payload = node.residual(), said(mine, node.residual())
    node.ask(FinalizeRequest(Round(0), (member(other.train(0).pending, ME),)))
    assert torch.equal(node.residual(), before + payload)


def test_what_is_sent_and_what_is_kept_add_up_over_many_rounds(homes):
    """e' + payload = β·e + Δ each round: with Δ measured from outside, nothing is lost or said twice."""
    node, other = homes("a"), homes("b", OTHER)
    for number in range(6):
        old = node.residual() if number else None
        pending = node.train(number).pending
        payload = said(pending, node.residual())
        total = node.residual() + payload
        theirs = member(other.train(number).pending, OTHER)
        is_in = number % 2 == 0
        node.ask(FinalizeRequest(Round(number), (member(pending), theirs) if is_in else (theirs,)))
        kept = node.residual()
        assert torch.equal(kept + payload if is_in else kept, total)
        if old is not None:
            assert not torch.equal(kept, old)
        other.ask(FinalizeRequest(Round(number), (theirs,)))


@pytest.mark.parametrize("part", ["spool", "state"])
def test_a_full_disk_after_training_repeats_the_saving_only(homes, part):
    node, twin = homes("a"), homes("b")
    mend = blocked(node.path / part)
    for _ in range(2):
        with pytest.raises(DiskFault):
            node.train(0)
    mend()
    trained = node.train(0)
    assert node.steps == 0, "the steps were not taken again"
    assert trained.pending.payload == twin.train(0).pending.payload
    assert torch.equal(node.residual(), twin.residual())
    assert len(node.restart().pending) == 1


def test_a_round_that_became_final_while_the_disk_was_full_is_given_back_once(homes):
    node, other = homes("a"), homes("b", OTHER)
    node.train(0)
    mend = blocked(node.path / "state")
    with pytest.raises(DiskFault):
        node.train(1)
    theirs = [member(other.train(number).pending, OTHER) for number in range(3)]
    for number in (0, 1):
        for _ in range(2):
            with pytest.raises(DiskFault):
                node.ask(FinalizeRequest(Round(number), (theirs[number],)))
    mend()
    late = node.train(1).pending
    node.ask(FinalizeRequest(Round(2), (theirs[2],)))
    twin = homes("c")
    first, second = twin.train(0).pending, twin.train(1).pending
    assert late.payload == second.payload
    aged = SPEC.compress.feedback * said(first, twin.residual())
    expected = twin.residual() + aged + said(second, twin.residual())
    assert torch.allclose(node.residual(), expected, atol=1e-7)


@pytest.mark.parametrize("is_late", [False, True])
def test_rounds_that_are_trained_while_the_disk_takes_nothing_are_sent_once(homes, is_late):
    """A round closes without work that is nowhere on the disk yet, and the next begins from the others' view."""
    node, twin, other = homes("a"), homes("b"), homes("c", OTHER)
    theirs = [member(other.train(number).pending, OTHER) for number in range(2)]
    mend = blocked(node.path / "spool")
    done: dict[Home, list[Pending]] = {node: [], twin: []}
    for number in range(2):
        for home, all_done in done.items():
            *_, trained = home.session.train(home.train_ask(number))
            all_done.append(trained.pending)
            if home is twin:
                home.keep(number)
            else:
                for before in range(number + 1):
                    with pytest.raises(DiskFault):
                        home.keep(before)
            home.ask(FoldRequest(Round(number), (theirs[number],)))
    mend()
    for number in range(2):
        node.keep(number)
    assert [one.payload for one in done[node]] == [one.payload for one in done[twin]]
    expected = node.residual()
    assert torch.equal(expected, twin.residual())
    if not is_late:
        expected = expected + SPEC.compress.feedback * said(done[node][0], expected)
    for home, (first, second) in done.items():
        members = (theirs[0], member(first)) if is_late else theirs[:1]
        home.ask(FoldRequest(Round(0), tuple(members)))
        home.ask(FinalizeRequest(Round(0), tuple(members)))
        assert torch.allclose(home.residual(), expected, atol=1e-7)
        assert home.restart().pending == (second,)


@contextlib.contextmanager
def held_disk(monkeypatch):
    """No fsync ends inside the block until `go` is set."""
    go, fsync = threading.Event(), os.fsync

    def late(descriptor):
        assert go.wait(timeout=HANGS_S)
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", late)
        try:
            yield go
        finally:
            go.set()


def test_the_next_round_is_trained_while_the_disk_works(homes, monkeypatch):
    """A round is safe when the disk says so: a kill before that finds the state before it."""
    node, twin = homes("a", spec=OVERLAPPING), homes("b", spec=OVERLAPPING)
    node.train(0)
    with held_disk(monkeypatch) as go:
        *_, first = node.session.train(node.train_ask(1))
        second = list(islice(node.session.train(node.train_ask(2)), 2))
        assert [type(event) for event in second] == [TrainProgress] * 2
        assert node.session.finish_save(SaveRequest(Round(1))) is None
        shutil.copytree(node.path, twin.path, dirs_exist_ok=True)
        go.set()
        node.keep(1)
    assert [pending.round for pending in node.restart().pending] == [0, 1]
    assert [pending.round for pending in twin.restart().pending] == [0]
    *_, again = twin.events(1)
    assert again.pending.payload == first.pending.payload


def test_a_disk_that_fails_late_is_told_and_tried_again(homes, monkeypatch):
    node, told = homes("a"), []
    (node.path / "state").mkdir()

    def broken(descriptor):
        raise OSError(errno.EIO, "Input/output error")

    node.session = Session(node.start, saved=lambda: told.append("news"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        *_, trained = node.session.train(node.train_ask(0))
        for _ in range(2):
            with pytest.raises(DiskFault, match="Input/output"):
                node.keep(0)
    node.keep(0)
    assert len(told) == 3
    assert node.restart().pending == (trained.pending,)
    assert Path(trained.pending.path).stat().st_size == trained.payload_bytes


def test_a_round_that_ends_while_the_one_before_is_saved_is_kept_too(homes, monkeypatch):
    """The disk may take longer than a round does: the save of one round says nothing of the next one."""
    node = homes("a", spec=OVERLAPPING)
    node.train(0)
    with held_disk(monkeypatch) as go:
        list(node.session.train(node.train_ask(1)))
        threading.Timer(0.05, go.set).start()
        *_, second = node.session.train(node.train_ask(2))
        for number in (1, 2):
            node.keep(number)
    data = Path(second.pending.path).read_bytes()
    assert manifest_of_bytes(data).id == second.pending.payload
    assert [pending.round for pending in node.restart().pending] == [0, 1, 2]


def test_steps_count_as_saved_when_their_own_round_is(tmp_path):
    """Not when the round before them is."""
    clock = iter(range(1_000, 10**9, 10))
    ledger = TimeAccount(lambda: next(clock))
    session = Session(
        StartRequest(codec.encode(OVERLAPPING), ME, str(tmp_path), "", 1, "cpu"), ledger, TimeBudget(math.inf)
    )
    ledger.enter("steps")
    list(session.train(TrainRequest(Round(0), 0, 1, SPEC.steps(0), -1)))
    ledger.enter("steps")
    list(session.train(TrainRequest(Round(1), 0, 1, SPEC.steps(1), -1)))
    ledger.enter("wait")
    unsaved_ns = ledger.read().unsaved_ns
    session._end_save()
    assert ledger.read().unsaved_ns < unsaved_ns


@pytest.mark.parametrize("part", ["spool", "state"])
def test_a_round_that_was_saved_by_another_ask_is_not_trained_again(homes, part):
    """The disk refused it at first; then a Finalize found room for everything."""
    node = homes("a")
    first = member(node.train(0).pending)
    mend = blocked(node.path / part)
    with pytest.raises(DiskFault):
        node.train(1)
    mend()
    node.ask(FinalizeRequest(Round(0), (first,)))
    trained = node.train(1)
    assert node.steps == 0, "the steps were not taken again"
    assert node.restart().pending == (trained.pending,)


def test_who_is_stopped_after_the_disk_refused_a_round_saves_it(homes):
    node = homes("a")
    node.train(0)
    mend = blocked(node.path / "state")
    with pytest.raises(DiskFault):
        list(node.session.train(node.train_ask(1)))
    mend()
    node.session.close()
    assert [pending.round for pending in node.restart().pending] == [0, 1]


@pytest.mark.parametrize("is_full", [False, True])
def test_who_is_stopped_in_the_round_after_one_that_the_disk_refused_saves_that_one(homes, is_full):
    """A node on a full disk trains on while a round waits to be saved."""
    node = homes("a")
    node.train(0)
    mend = blocked(node.path / "spool")
    with contextlib.suppress(DiskFault):
        list(node.session.train(node.train_ask(1)))
    at_hand = node.session.train(node.train_ask(2))
    next(at_hand)
    if not is_full:
        mend()
        node.session.close()
        assert [pending.round for pending in node.restart().pending] == [0, 1]
    else:
        with pytest.raises(DiskFault):
            node.session.close()
        mend()


def test_what_a_kill_left_of_a_payload_is_deleted(homes):
    node = homes("a")
    rest = node.path / "spool" / ("0" * 64 + ".payload.part")
    others = node.path / "spool" / "snapshot-0.safetensors.part"
    for path in (rest, others):
        path.write_bytes(b"half")
    node.train(0)
    assert not rest.exists()
    assert others.exists(), "somebody may be writing it"


def test_what_a_final_set_lacks_returns_from_a_payload_that_is_no_file_yet(homes, monkeypatch):
    node, other, twin = homes("a"), homes("b", OTHER), homes("c")
    theirs = member(other.train(0).pending, OTHER)
    (node.path / "state").mkdir()
    with held_disk(monkeypatch) as go:
        list(node.session.train(node.train_ask(0)))
        node.session._save_budget = TimeBudget(1e-9)
        node.session._save_budget.asked()
        node.ask(FinalizeRequest(Round(0), (theirs,)))
        go.set()
        node.keep(0)
    pending = twin.train(0).pending
    expected = twin.residual() + said(pending, twin.residual())
    assert torch.equal(node.session._feedback.residual_C4096, expected)


def test_a_check_of_a_final_round_is_superseded(homes):
    """Its payloads were fetched again, and meanwhile the others made the round final."""
    node = homes("a")
    members = (member(node.train(0).pending),)
    node.ask(FinalizeRequest(Round(0), members))
    with pytest.raises(Superseded, match="round 0 is final already"):
        node.ask(CheckRequest(Round(0), members))


def test_a_finalize_that_could_not_be_saved_is_asked_again(homes):
    node = homes("a")
    members = (member(node.train(0).pending),)
    state = node.ask(CheckRequest(Round(0), members)).state
    mend = blocked(node.path / "state")
    for _ in range(2):
        with pytest.raises(DiskFault):
            node.ask(FinalizeRequest(Round(0), members))
    mend()
    assert node.ask(FinalizeRequest(Round(0), members)).state == state
    assert node.restart().final == 0


def test_a_finalize_during_training_is_saved_with_the_round(homes):
    node = homes("a")
    first = member(node.train(0).pending)
    node.ask(FoldRequest(Round(0), (first,)))
    steps = node.events(1)
    next(steps)
    node.ask(FinalizeRequest(Round(0), (first,)))
    assert load_local(node.path / "state", SPEC.id).body.final == -1
    (*_, trained) = steps
    assert load_local(node.path / "state", SPEC.id).body.final == 0
    assert node.restart().pending == (trained.pending,)


def test_the_last_state_of_a_run_is_saved_at_once(homes):
    """Users export the result of a run while its nodes still serve it to others."""
    node = homes("a")
    last = SPEC.outer.rounds - 1
    for number in range(SPEC.outer.rounds):
        members = (member(node.train(number).pending),)
        node.session._save_budget.asked()
        node.ask(FinalizeRequest(Round(number), members))
        assert node.saved().body.final == (number if number == last else number - 1)


def test_adopting_a_snapshot_settles_each_payload_once(homes):
    ahead, node = homes("a", OTHER), homes("b")
    pendings = [node.train(number).pending for number in range(2)]
    before, lost = node.residual(), said(pendings[1], node.residual())
    states: list[Digest] = []
    for number in range(3):
        members = [member(ahead.train(number).pending, OTHER)] + ([member(pendings[0])] if number == 0 else [])
        states.append(ahead.ask(FinalizeRequest(Round(number), tuple(members))).state)
    made = ahead.ask(SnapshotRequest(str(ahead.path / "snapshot")))
    whole = (Span(0, arena_of(SPEC.model).chunks),)
    adopt = AdoptRequest(Round(2), made.path, states[2], (Counted(pendings[0].payload, whole, Round(0)),))
    mend = blocked(node.path / "state")
    for _ in range(2):
        with pytest.raises(DiskFault):
            node.ask(adopt)
    mend()
    node.ask(adopt)
    assert torch.equal(node.residual(), before + lost)
    assert (node.restart().final, node.session.started().state) == (2, states[2])


def test_a_snapshot_with_another_state_is_refused(homes):
    ahead, node = homes("a", OTHER), homes("b")
    ahead.ask(FinalizeRequest(Round(0), (member(ahead.train(0).pending, OTHER),)))
    made = ahead.ask(SnapshotRequest(str(ahead.path / "snapshot")))
    with pytest.raises(OtherChain):
        node.ask(AdoptRequest(Round(0), made.path, digest(b"another"), ()))
    with pytest.raises(DecodeError) as lie:
        node.ask(AdoptRequest(Round(1), made.path, digest(b"another"), ()))
    assert not isinstance(lie.value, OtherChain), "its lease names the round of that very blob"
    assert node.session.started().final == -1


def test_an_evaluation_names_the_view_that_it_measured(homes):
    node = homes("a")
    folded = node.ask(FoldRequest(Round(0), (member(node.train(0).pending),)))
    steps = node.session.train(TrainRequest(Round(1), 0, 1, 2, -1))
    next(steps)
    found = node.ask(EvaluateRequest())
    assert found.state == folded.state
    assert found.val_bpb > 0
    (*_, trained) = steps
    twin = homes("b")
    twin.ask(FoldRequest(Round(0), (member(twin.train(0).pending),)))
    assert trained.pending.payload == twin.train(1).pending.payload, "an evaluation leaves training as it was"


def test_a_payload_that_vanished_is_a_fault_of_ours(homes):
    node = homes("a")
    pending = node.train(0).pending
    Path(pending.path).unlink()
    with pytest.raises(CorruptFault):
        node.ask(FoldRequest(Round(0), (member(pending),)))
    assert node.restart().pending == (), "it is not offered again"


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_payload_that_rotted_in_the_spool_is_given_up_and_nothing_else(homes, damage):
    """What the round before missed returns once, whatever became of the newer payload."""
    ahead, node = homes("a", OTHER), homes("b")
    first, second = node.train(0).pending, node.train(1).pending
    before, lost = node.residual(), said(first, node.residual())
    data = bytearray(Path(second.path).read_bytes())
    data[-1] ^= 2  # another sign
    Path(second.path).write_bytes(data[:-1] if damage == "cut" else data)
    theirs = [member(ahead.train(number).pending, OTHER) for number in range(3)]
    states = [ahead.ask(FinalizeRequest(Round(number), (theirs[number],))).state for number in range(2)]
    made = ahead.ask(SnapshotRequest(str(ahead.path / "snapshot")))
    node.ask(AdoptRequest(Round(1), made.path, states[1], ()))
    node.ask(FinalizeRequest(Round(2), (theirs[2],)))
    assert torch.equal(node.residual(), before + SPEC.compress.feedback * lost), "as if it had never been sent"


@pytest.mark.parametrize(("tokens", "weight"), [(0, 1), (1, 1), (50, 32), (100, 64), (1000, 255)])
def test_the_weight_is_the_share_of_the_nominal_tokens(tokens, weight):
    assert weight_of(tokens, 100) == weight


def test_time_goes_where_the_work_is_and_a_round_given_up_is_recompute(tmp_path):
    clock = iter(range(1_000, 10**9, 10))
    ledger = TimeAccount(lambda: next(clock))
    session = Session(
        StartRequest(codec.encode(SPEC), ME, str(tmp_path), "", 1, "cpu"), ledger, TimeBudget(math.inf)
    )
    ledger.enter("steps")
    given_up = session.train(TrainRequest(Round(0), 0, 1, SPEC.steps(0), -1))
    next(given_up)
    given_up.close()
    before = ledger.read()
    assert before.recompute_ns > 0
    assert (before.encode_ns, before.checkpoint_ns) == (0, 0)
    assert before.steps_ns <= 10, "one look at the clock"
    *_, trained = session.train(TrainRequest(Round(0), 0, 1, SPEC.steps(0), -1))
    assert ledger.read().unsaved_ns > 0, "the disk has not said that it is safe"
    poll("the round is safe", lambda: session.finish_save(SaveRequest(Round(0))))
    after = ledger.read()
    assert after.recompute_ns - before.recompute_ns <= 10, "one look at the clock"
    assert min(after.steps_ns, after.encode_ns, after.checkpoint_ns) > 0
    assert after.unsaved_ns < after.steps_ns, "what is saved counts"
    ledger.enter("fold")
    session.answer(FinalizeRequest(Round(0), (member(trained.pending),)))
    assert ledger.read().checkpoint_ns > after.checkpoint_ns


def test_steps_that_a_full_disk_did_not_take_are_not_in_vain(tmp_path):
    clock = iter(range(1_000, 10**9, 10))
    ledger = TimeAccount(lambda: next(clock))
    session = Session(StartRequest(codec.encode(SPEC), ME, str(tmp_path), "", 1, "cpu"), ledger)
    ledger.enter("steps")
    free = blocked(tmp_path / "state")
    ask = TrainRequest(Round(0), 0, 1, SPEC.steps(0), -1)
    with pytest.raises(DiskFault):
        list(session.train(ask))
    assert ledger.read().unsaved_ns > 0
    free()
    assert len(list(session.train(ask))) == 1
    assert ledger.read().recompute_ns == 0


def test_between_rounds_saving_takes_a_small_share_of_the_time(homes):
    """What is not saved is asked for again, and gives the same bits; a good end saves it."""
    node = homes("a")
    members = (member(node.train(0).pending),)
    node.session = Session(node.start, saves=TimeBudget(1e-9))
    assert node.ask(FinalizeRequest(Round(0), members))
    assert node.restart().final == 0, "the first one is saved"
    node.session = Session(node.start, saves=TimeBudget(1e-9))
    for number in (1, 2):
        members = (member(node.train(number).pending),)
        state = node.ask(FinalizeRequest(Round(number), members)).state
        assert node.saved().body.final == number - 1, "the trained round was saved, what came after it was not"
    node.session.close()
    assert node.saved().body.final == 2
    assert node.restart().state == state


@pytest.mark.parametrize("spec", [SPEC, OVERLAPPING], ids=["plain", "overlap"])
def test_a_worker_that_does_not_train_finds_what_a_trainer_finds(homes, tmp_path, spec):
    trainer, watcher = homes("trainer", ME, spec), Home(tmp_path / "watcher", OTHER, spec, trains=False)
    for number in range(3):
        work = member(trainer.train(number).pending, ME)
        found = []
        for node in (trainer, watcher):
            node.session.answer(FinalizeRequest(Round(number), (work,)))
            found.append(node.session.answer(EvaluateRequest()))
        assert (found[0].state, found[0].val_bpb) == (found[1].state, found[1].val_bpb)
        watcher.restart()
    with pytest.raises(AtollError, match="started without training"):
        next(watcher.session.train(watcher.train_ask(3)))


def test_a_trainer_that_only_watches_for_a_while_loses_nothing(homes):
    """It trains on as if it had only been stopped: what it saved meanwhile leaves no trace in its weights.

    The run has two fragments: half of what was trained is not sent yet.
    """
    parts = msgspec.structs.replace(SPEC, outer=msgspec.structs.replace(SPEC.outer, fragments=2))
    steady, shaken = homes("steady", ME, parts), homes("shaken", ME, parts)
    for node in (steady, shaken):
        work = member(node.train(0).pending, ME)
        node.session.answer(FoldRequest(Round(0), (work,)))
        node.train(1)
        node.restart()
    trains, shaken.start = shaken.start, msgspec.structs.replace(shaken.start, trains=False)
    shaken.restart()
    shaken.session.answer(EvaluateRequest())
    for node in (steady, shaken):
        node.session.answer(FinalizeRequest(Round(0), (work,)))
        node.session.close()
    shaken.start = trains
    steady.restart()
    shaken.restart()
    assert steady.train(2).pending.payload == shaken.train(2).pending.payload


def test_a_worker_without_the_text_folds_and_cannot_validate(homes, tmp_path):
    trainer = homes("trainer")
    seeder = Home(tmp_path / "seeder", OTHER, trains=False, reads_text=False)
    seeder.session.answer(FinalizeRequest(Round(0), (member(trainer.train(0).pending, ME),)))
    assert seeder.session.started().final == 0
    with pytest.raises(ConfigError, match="reads no text"):
        seeder.session.answer(EvaluateRequest())
