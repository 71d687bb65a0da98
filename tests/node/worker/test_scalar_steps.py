"""Zeroth-order runs in whole sessions: a kill, a late join, partial sets, one digest; and what they keep."""

from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from atoll.node.import_export.save_shard import save_shard
from atoll.node.learning.inner.loop import learning_rate
from atoll.node.learning.model.bridge import read_rows
from atoll.node.learning.zeroth_order.scalar_fold import read_scalars
from atoll.node.worker.multi_device.modes import check_devices
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    CheckRequest,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotRequest,
    TrainReply,
    VerifyRequest,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import HEADER_BYTES, Layout
from atoll.protocols.run.run_spec import sign_run
from atoll.protocols.run.sections.compression import CompressSpec
from atoll.protocols.run.sections.zeroth_order import seed_of, unit_of
from tests.node.worker.session_home import SPEC, Home, member
from tests.plain import scalars as plain

PEERS = [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
STEPS = 2


def scalar_spec(**outer):
    found = replace(
        SPEC,
        inner=replace(SPEC.inner, optimizer="spsa", lr=1e-3, clip=4.0),
        outer=replace(SPEC.outer, **outer),
        compress=CompressSpec(codec="scalar", k=STEPS, feedback=0.0),
    )
    found.check()
    return found


def trained(homes, number):
    return tuple(member(home.train(number).pending, home.start.peer) for home in homes)


@pytest.mark.parametrize("more", [{}, {"rule": "nesterov", "alpha_256": 179}, {"rule": "co2", "clip_65536": 99}])
def test_a_kill_and_a_late_join_give_one_digest(tmp_path, more):
    spec = scalar_spec(**more)
    homes = [Home(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    states = []
    for number in range(3):
        members = trained(homes, number)
        found = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
        assert len(found) == 1
        states += found
    assert len(set(states)) == 3, "each round moves the model"
    assert homes[1].restart().state == states[-1]
    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    joiner = Home(tmp_path / "late", PEERS[2], spec)
    joiner.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    members = trained([*homes, joiner], 3)
    homes[0].ask(FoldRequest(Round(3), members[:1]))  # provisional, with another set
    seen = {joiner.ask(CheckRequest(Round(3), members[::-1])).state}
    seen |= {home.ask(FinalizeRequest(Round(3), members)).state for home in (*homes, joiner)}
    assert len(seen) == 1


def scalars_of(pending, spec):
    layout = Layout("scalar", arena_of(spec.model).chunks, spec.compress.k)
    return read_scalars(Path(pending.path).read_bytes(), layout)


def test_the_payload_says_all_that_the_member_moved_by(tmp_path):
    """Also what another makes of it, by the definition, from run, round and author alone."""
    spec = scalar_spec()
    home = Home(tmp_path, PEERS[0], spec)
    before = home.session._fold.view_C4096.numpy().astype(np.int64)
    pending = home.train(0).pending
    assert Path(pending.path).stat().st_size == HEADER_BYTES + STEPS
    sent = scalars_of(pending, spec)
    assert sent.all(), "each step moved it"
    members = [(pending.weight, seed_of(spec.id, 0, PEERS[0]), sent.tolist())]
    unit = unit_of(spec.inner.lr, spec.inner.clip)
    home.ask(FinalizeRequest(Round(0), (member(pending, PEERS[0]),)))
    found = home.session._fold.view_C4096.numpy()
    wanted = plain.moved(before, members, 256, unit)
    real = before != 0  # padding stays zero, and few of the values that were drawn are
    assert np.array_equal(found[real], wanted[real])
    # As somebody else's work it would be another step.
    assert seed_of(spec.id, 0, PEERS[0]) != seed_of(spec.id, 0, PEERS[1])


def test_the_slope_of_a_step_is_that_of_the_loss(tmp_path):
    """A step is −η·g·z: g against the gradient that autograd has, along z."""
    spec = scalar_spec()
    home = Home(tmp_path, PEERS[0], spec)
    steps, learner, trainer = home.session._rounds.scalars, home.session._learner, home.session._rounds
    windows = trainer.data.validation(2)
    steps.begin(0, home.session._fold.view_C4096)
    steps.step(windows, 5)
    (scalar,) = steps._scalars
    with learner.weights.replaced_by(home.session._fold.view_C4096):
        loss = learner.inner.passes.run(torch.from_numpy(windows), learner.inner._begin)
        named = {name: value.grad for name, value in learner.module.named_parameters()}
        assert float(loss) > 0
        arena = arena_of(spec.model)
        gradient = np.zeros((arena.chunks, 4096), np.float32)
        read_rows(named, arena, 0, torch.from_numpy(gradient))
    z = plain.direction(seed_of(spec.id, 0, PEERS[0]), 0, arena.chunks)
    wanted = float((gradient * z).sum())
    got = scalar * unit_of(spec.inner.lr, spec.inner.clip) * 2.0**-30 / learning_rate(spec.inner, 5)
    assert got == pytest.approx(max(-4, min(4, wanted)), abs=0.1)


def test_no_step_is_longer_than_the_clip(tmp_path):
    spec = scalar_spec()
    spec = replace(spec, inner=replace(spec.inner, clip=0.01, warmup_steps=0))
    home = Home(tmp_path, PEERS[0], spec)
    steps = home.session._rounds.scalars
    steps.begin(0, home.session._fold.view_C4096)
    # At its peak rate, along a direction that is much steeper than the clip: the longest step, and no more.
    steps.step(home.session._rounds.data.validation(2), 0)
    (scalar,) = steps._scalars
    longest = round(spec.inner.lr * spec.inner.clip / (unit_of(spec.inner.lr, spec.inner.clip) * 2.0**-30))
    assert 120 <= longest <= 127
    assert abs(scalar) == longest


def test_nothing_of_the_models_size_is_kept_but_the_model(tmp_path):
    spec = scalar_spec()
    home = Home(tmp_path, PEERS[0], spec)
    for number in range(2):
        home.ask(FinalizeRequest(Round(number), trained([home], number)))
    kept = home.saved().tensors
    large = {name for name, value in kept.items() if value.numel() > 1000}
    assert large == {"final"}
    assert not home.session._learner.weights.anchor_C4096.any()
    assert all(value.grad is None for value in home.session._learner.module.parameters())


def test_work_that_missed_its_final_set_is_lost_and_nothing_else(tmp_path):
    spec = scalar_spec()
    homes = [Home(tmp_path / str(at), peer, spec) for at, peer in enumerate(PEERS[:2])]
    for number, count in enumerate((1, 2)):
        members = trained(homes, number)[:count]
        found = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
        assert len(found) == 1
        assert homes[1].session._feedback.pending == ()
        assert homes[1].restart().state in found


def test_a_validation_in_the_midst_of_a_round_changes_nothing(tmp_path):
    spec = scalar_spec()
    plain_home, asked = Home(tmp_path / "plain", PEERS[0], spec), Home(tmp_path / "asked", PEERS[0], spec)
    for event in asked.events(0):
        if isinstance(event, TrainReply):
            found = event
        else:
            asked.ask(EvaluateRequest())
    assert scalars_of(found.pending, spec).tolist() == scalars_of(plain_home.train(0).pending, spec).tolist()


def test_an_illegal_payload_is_refused_before_it_is_folded(tmp_path):
    spec = scalar_spec()
    home = Home(tmp_path, PEERS[0], spec)
    path = Path(home.train(0).pending.path)
    home.ask(VerifyRequest(str(path), Round(0)))
    path.write_bytes(path.read_bytes()[:-1] + b"\x80")
    with pytest.raises(DecodeError, match="a scalar that nobody writes"):
        home.ask(VerifyRequest(str(path), Round(0)))


def test_what_it_cannot_do_is_one_line(tmp_path):
    owner = Identity(bytes([1]) * 32)
    spec = replace(scalar_spec(), owner=owner.peer_id)
    with pytest.raises(ConfigError, match="takes each step on one device"):
        check_devices(spec, 2)
    check_devices(spec, 1)
    with pytest.raises(ConfigError, match="has no moments to save"):
        save_shard(sign_run(spec, owner), tmp_path, owner, tmp_path / "to")
