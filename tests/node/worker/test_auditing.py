"""An audit tells work on the assigned windows from work on others, with forward passes alone."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.data.dataset import assigned, windows
from atoll.node.learning.inner import evaluate
from atoll.node.learning.model import bridge
from atoll.node.worker.audits.measuring import audit as measure
from atoll.node.worker.audits.measuring import (
    claimed_windows,
    compared,
    difference,
    drawn,
    excess,
    moved,
    originals,
    whitened,
)
from atoll.node.worker.audits.replays import SentPayloads
from atoll.node.worker.round_trainer import Budget
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.records import MAX_EXCESS
from atoll.protocols.local.worker_messages import AuditReply, AuditRequest, FinalizeRequest, FoldRequest, Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import Stage
from atoll.protocols.run.sections.audits import AuditSpec
from tests.node.worker.session_home import SPEC, Home, member, said

STEPS, PEERS = 4, [Identity(bytes([n]) * 32).peer_id for n in range(1, 4)]
SEED = 0
"""Of the windows that are looked at. With eight seeds the mean of three was 8 to 29; of copies below -20."""
AUDITED = msgspec.structs.replace(
    SPEC,
    data=msgspec.structs.replace(SPEC.data, source="synthetic:markov?size=262144"),
    inner=msgspec.structs.replace(SPEC.inner, batch=16),
    outer=msgspec.structs.replace(SPEC.outer, stages=(Stage(0, STEPS),)),
    audit=AuditSpec(windows=64),
)
CONTEXT = AUDITED.model.context


def all_trained(tmp_path_factory, spec=AUDITED):
    """Three members that trained round 0, and their contributions."""
    homes = [Home(tmp_path_factory.mktemp("home"), peer, spec) for peer in PEERS]
    for home in homes:
        home.pending = home.train(0).pending
    return homes, [member(home.pending, peer) for home, peer in zip(homes, PEERS, strict=True)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return all_trained(tmp_path_factory)


def audit(home, about, others, steps=STEPS, seed=SEED):
    tokens = steps * AUDITED.inner.batch * CONTEXT
    reply = home.ask(AuditRequest(Round(0), tokens, seed, about, tuple(others), (about, *others), Round(0)))
    assert isinstance(reply, AuditReply)
    assert reply.took_s > 0
    return reply.excess


def test_work_on_the_assigned_windows_stands_out_and_copied_work_does_not(trained):
    homes, (one, two, three) = trained
    honest = np.mean([audit(homes[2], one, [two, three], seed=seed) for seed in range(3)])
    # The same bytes under another name: the windows are those of the copier.
    copy = msgspec.structs.replace(one, author=PEERS[1])
    copied = np.mean([audit(homes[2], copy, [two, three], seed=seed) for seed in range(3)])
    assert honest > 16, "a deviation, of a first round with three members"
    assert copied < honest - 24


def test_a_payload_of_an_earlier_round_has_the_lowest_verdict(trained, monkeypatch):
    homes, (one, two, three) = trained
    session = homes[2].session
    monkeypatch.setattr(session, "_sent", SentPayloads(session._sent._layout, np.random.default_rng(1)))

    def asked(number, about, others):
        return AuditRequest(Round(number), STEPS, SEED, about, others, (about, *others), Round(number))

    assert homes[2].ask(asked(0, one, (two, three))).excess > -MAX_EXCESS
    again = msgspec.structs.replace(one, author=PEERS[1])
    assert homes[2].ask(asked(1, again, (three,))).excess == -MAX_EXCESS
    early = msgspec.structs.replace(asked(1, again, (three,)), before=Round(0))
    assert homes[2].ask(early).excess > -MAX_EXCESS, "it was known before round 0 was final"


def test_of_two_contributions_that_are_alike_the_copy_improves_the_windows_of_the_other(trained):
    homes, (one, _, three) = trained
    copy = msgspec.structs.replace(one, author=PEERS[1], entry=digest(b"copy"))
    spec, data = AUDITED, homes[2].session._data
    rng, seen = np.random.default_rng(SEED), homes[2].session._sent

    def windows_for(about):
        ask = AuditRequest(
            Round(0), STEPS * spec.inner.batch * CONTEXT, SEED, about, (three,), (one, copy, three), Round(0)
        )
        return set(compared(spec, data, ask, rng, drawn(spec, data, ask, rng), seen))

    turns = {peer: data.windows_of(spec, Turn(Round(0), peer), np.arange(64)) for peer in PEERS}
    assert windows_for(one) == set(turns[PEERS[1]])
    assert windows_for(copy) == set(turns[PEERS[0]])
    assert windows_for(three) != set(turns[PEERS[0]])
    found = [audit(homes[2], about, [other, three]) for about, other in ((one, copy), (copy, one))]
    assert found[0] > 16
    assert found[1] < -16


def test_an_audit_changes_nothing_here(trained):
    homes, (one, two, three) = trained
    session = homes[0].session
    before = {name: value.clone() for name, value in session._learner.weights.tensors().items()}
    view = session._fold.view_C4096.clone()
    audit(homes[0], two, [one, three])
    assert torch.equal(view, session._fold.view_C4096)
    assert all(torch.equal(value, before[name]) for name, value in session._learner.weights.tensors().items())


def test_a_payload_that_is_none_is_a_fault_and_no_verdict(trained, tmp_path):
    homes, (one, two, _) = trained
    (tmp_path / "bad").write_bytes(Path(one.path).read_bytes()[:-1])
    with pytest.raises(DecodeError):
        audit(homes[2], msgspec.structs.replace(one, path=str(tmp_path / "bad")), [two])


def test_windows_are_those_that_a_member_trains_on(trained, monkeypatch):
    rounds, data = trained[0][0].session._rounds, trained[0][0].session._data
    place = assigned(AUDITED.seed, 3, PEERS[0], AUDITED.inner.batch)
    assigned_W = np.concatenate([windows(place, step, data.num_windows) for step in range(STEPS)])
    seen = []
    monkeypatch.setattr(rounds.learner, "step", lambda tokens, at: seen.append(tokens) or 0.0)
    whole = trained[0][0].train_ask(3)
    few = msgspec.structs.replace(whole, sequences=1)
    for ask, sequences in ((whole, AUDITED.inner.batch), (few, 1)):
        seen.clear()
        budget = Budget(ask, ask.steps, sequences)
        for step in range(STEPS):
            rounds._step(Turn(ask.round, PEERS[0], ask.slot, ask.slots), budget, step, step)
            budget.took_step(step + 1, 1.0)
        assert np.array_equal(np.concatenate(seen), data.batch(assigned_W[: STEPS * sequences]))
    most = AUDITED.steps(3) * AUDITED.inner.batch
    for tokens, weight, count in (
        (STEPS * AUDITED.inner.batch * CONTEXT, 64, most),
        (AUDITED.inner.batch * CONTEXT, 1, AUDITED.inner.batch),
        (3 * CONTEXT, 1, 3),
        (CONTEXT, 64, most),
        (1 << 47, 64, most),
        (1 << 47, 255, -(-509 * AUDITED.steps(3) * AUDITED.inner.batch // 128)),
        (1, 1, 1),
    ):
        claim = AuditRequest(Round(3), tokens, SEED, Member(b"", PEERS[0], weight, b"", ""), (), (), Round(0))
        assert claimed_windows(AUDITED, claim) == count
        found = drawn(AUDITED, data, claim, np.random.default_rng(1))
        assert len(set(found)) == min(count, AUDITED.audit.windows)
        if count <= most:
            assert set(found) <= set(assigned_W[:count]), "of the windows that it says it took"


def test_members_and_rounds_have_windows_of_their_own():
    places = {assigned(1, number, peer, 8).first_step for number in range(20) for peer in PEERS}
    assert len(places) == 60


def test_what_the_others_sent_too_and_embeddings_are_left_out(trained):
    homes, (one, two, three) = trained
    arena = arena_of(AUDITED.model)
    like = torch.zeros((arena.chunks, 4096))
    ask = AuditRequest(Round(0), STEPS, SEED, one, (two, three), (), Round(0))
    own, *values = [said(home.pending, like, AUDITED) for home in homes]
    found = difference(AUDITED, ask)
    for place in arena.placements:
        if len(place.shape) == 2 and place.name.startswith("model.layers."):
            rows = slice(place.first_chunk, place.first_chunk + place.blocks[0] * place.blocks[1])
            # Of what is longer in a matrix the audited one's length.
            parts = [min(1.0, float(own[rows].norm() / each[rows].norm())) * each[rows] for each in values]
            assert torch.allclose(found[rows], own[rows] - sum(parts) / 2, rtol=1e-4, atol=1e-9)
            assert found[rows].any()
        else:
            assert not found[place.first_chunk].any()


def sent_as(values_C4096, path):
    """A payload of these values, of somebody who trained nothing."""
    nothing, codec = torch.zeros_like(values_C4096), codec_of(AUDITED.compress.codec, AUDITED.compress.k)
    path.write_bytes(codec.encode(values_C4096.clone(), nothing, nothing, 1.0))
    name = digest(str(path).encode())
    return Member(name, Identity(bytes([9]) * 32).peer_id, 64, name, str(path))


@pytest.mark.parametrize("lie", ["copy", "noise"])
def test_what_another_sent_hides_no_work_and_turns_no_audit_around_however_long_it_is(trained, tmp_path, lie):
    homes, (one, two, _) = trained
    work = said(homes[0].pending, torch.zeros((arena_of(AUDITED.model).chunks, 4096)), AUDITED)
    noise = torch.randn(work.shape, generator=torch.Generator().manual_seed(1)) * (work != 0) * work.abs().mean()
    long = sent_as({"copy": 10 * work, "noise": 1000 * noise}[lie], tmp_path / "long")
    found = [audit(homes[2], one, [two, long], seed=seed) for seed in range(3)]
    assert np.mean(found) > 8, found


def rivals(homes, work, folder, count):
    """Work on the first member's windows that sends other values than its own: what it had no room for."""
    rest = homes[0].session._feedback.residual_C4096.clone()
    rest[work != 0] = 0
    most = rest.abs().topk(AUDITED.compress.k, dim=1).indices
    lie = torch.zeros_like(rest).scatter_(1, most, rest.gather(1, most))
    return [sent_as(10 * lie, folder / f"rival {at}") for at in range(count)]


def test_work_of_many_newcomers_on_a_members_windows_hides_none_of_its_own(trained, tmp_path):
    """They have a quarter of the weight together, and so much of the mean. No value is a copy."""
    homes, (one, two, three) = trained
    work = said(homes[0].pending, torch.zeros((arena_of(AUDITED.model).chunks, 4096)), AUDITED)
    crowd = rivals(homes, work, tmp_path, 6)
    light = [msgspec.structs.replace(each, weight=2) for each in crowd]
    ask = AuditRequest(Round(0), STEPS, SEED, one, (two, three, *light), (), Round(0))
    assert originals(ask, homes[2].session._sent) == ask.others
    found = [audit(homes[2], one, [two, three, *light], seed=seed) for seed in range(3)]
    heavy = [audit(homes[2], one, [two, three, *crowd], seed=seed) for seed in range(3)]
    assert np.mean(found) > 16 > 12 > np.mean(heavy), (found, heavy)


def test_copies_of_the_audited_contribution_are_no_others_however_many_there_are(trained, tmp_path):
    """Of work less eight copies of it nothing is left; less some that differ a little, what these choose."""
    homes, (one, two, three) = trained
    work = said(homes[0].pending, torch.zeros((arena_of(AUDITED.model).chunks, 4096)), AUDITED)
    noise = torch.rand(work.shape, generator=torch.Generator().manual_seed(2))
    changed = sent_as(work * (1 + noise), tmp_path / "changed")
    same = [msgspec.structs.replace(one, entry=digest(bytes([n])), author=PEERS[1]) for n in range(8)]
    ask = AuditRequest(Round(0), STEPS, SEED, one, (*same, changed, two, three), (), Round(0))
    assert originals(ask, homes[2].session._sent) == (two, three)
    many = msgspec.structs.replace(ask, others=(two,) * 9)
    assert originals(many, homes[2].session._sent) == (two,) * 8
    assert audit(homes[2], one, [*same, two, three]) > 8
    assert audit(homes[2], one, same) > 8, "all others are copies"


def test_of_a_longer_contribution_the_audited_ones_length_is_left_out(trained, tmp_path):
    """In each matrix by itself: all length on one of them is of no use."""
    homes, (one, _, _) = trained
    arena = arena_of(AUDITED.model)
    work = said(homes[0].pending, torch.zeros((arena.chunks, 4096)), AUDITED)
    expected = difference(AUDITED, AuditRequest(Round(0), STEPS, SEED, one, (one, one), (), Round(0)))
    assert not expected.any(), "as long as itself"
    places = [place for place in arena.placements if len(place.shape) == 2 and ".layers." in place.name]
    spans = [slice(at.first_chunk, at.first_chunk + at.blocks[0] * at.blocks[1]) for at in places]
    longer = work.clone()
    longer[spans[0]] *= 8
    longer[spans[1]] /= 2
    ask = AuditRequest(Round(0), STEPS, SEED, one, (sent_as(longer, tmp_path / "longer"),), (), Round(0))
    found = difference(AUDITED, ask)
    size = [float(work[rows].norm()) for rows in spans]
    assert float(found[spans[0]].norm()) < 0.02 * size[0]
    assert float(found[spans[1]].norm()) == pytest.approx(size[1] / 2, rel=0.02), "a shorter one as it is"


def test_a_step_is_divided_by_the_size_of_its_gradients_and_stays_as_long_in_losses(trained):
    homes, (one, two, three) = trained
    arena, session = arena_of(AUDITED.model), homes[0].session
    plain = difference(AUDITED, AuditRequest(Round(0), STEPS, SEED, one, (two, three), (), Round(0)))
    assert torch.equal(whitened(plain.clone(), arena, {}), plain), "a member without moments looks at it as it is"
    squares = session._learner.squared_gradients()
    size = bridge.gather(squares, arena).sqrt()
    found = whitened(plain.clone(), arena, squares)
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found != 0, plain != 0)
    assert float((found * size).norm()) == pytest.approx(float((plain * size).norm()), rel=1e-4)
    place = next(place for place in arena.placements if place.name.endswith("up_proj.weight"))
    rows = slice(place.first_chunk, place.first_chunk + place.blocks[0] * place.blocks[1])
    floor = float(squares[place.name].sqrt().mean()) / 16
    ratio = (found[rows] * (size[rows] + floor) / plain[rows])[plain[rows] != 0]
    assert float(ratio.std()) < 1e-3 * float(ratio.mean())
    nothing = {name: torch.zeros_like(value) for name, value in squares.items()}
    assert not whitened(plain.clone(), arena, nothing).any()


def test_members_whose_matrices_muon_moves_audit_too(tmp_path_factory):
    """Muon has no second moments: its members look at the step as it is (the preset `tiny` has Muon)."""
    inner = msgspec.structs.replace(AUDITED.inner, optimizer="muon", muon_lr=2.0)
    homes, (one, two, three) = all_trained(tmp_path_factory, msgspec.structs.replace(AUDITED, inner=inner))
    squares = homes[0].session._learner.squared_gradients()
    assert squares, "AdamW moves the rest"
    plain = difference(AUDITED, AuditRequest(Round(0), STEPS, SEED, one, (two, three), (), Round(0)))
    assert torch.equal(whitened(plain.clone(), arena_of(AUDITED.model), squares), plain)
    found = [audit(homes[1], about, others) for about, others in ((one, (two, three)), (three, (one, two)))]
    assert sum(found) > 0, found


@pytest.mark.parametrize(("windows", "others"), [(16, 16), (64, 64), (100, 136)])
def test_where_the_round_has_few_windows_random_ones_make_up_for_them(trained, monkeypatch, windows, others):
    homes, (one, two, three) = trained
    seen, session = [], homes[0].session
    spec = msgspec.structs.replace(AUDITED, audit=AuditSpec(windows=windows))
    ask = AuditRequest(Round(0), STEPS * AUDITED.inner.batch * CONTEXT, SEED, one, (two, three), (), Round(0))

    def losses_of(view, windows_WT1):
        seen.append(len(windows_WT1))
        return [0.0] * len(windows_WT1)

    measure(
        ask, spec, session._data, losses_of, session._fold.view_C4096, np.random.default_rng(1), {}, session._sent
    )
    assert seen == [min(windows, 64) + others] * 2


def test_a_moved_view_saturates_instead_of_failing():
    view = torch.tensor([[2**31 - 2, -(2**31) + 2, 5]], dtype=torch.int32)
    step = torch.tensor([[1.0, -1.0, 2.0**-24]])
    assert moved(view, step, 1).tolist() == [[2**31 - 1, -(2**31), 6]]
    assert moved(view, step, -1).tolist() == [[2**31 - 2 - 2**24, -(2**31) + 2 + 2**24, 4]]


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES, VALUES)
def test_an_excess_is_bounded_and_turns_around_with_its_sides(own, other):
    found = excess(own, other)
    assert -MAX_EXCESS <= found <= MAX_EXCESS
    assert excess(other, own) == -found
    assert excess([5.0] * len(own), [5.0] * len(other)) == 0


def test_an_excess_is_in_sixteenths_of_a_deviation():
    rng = np.random.default_rng(3)
    nothing = [excess(rng.normal(size=16), rng.normal(size=16)) for _ in range(2000)]
    assert abs(np.mean(nothing)) < 1.5
    assert 15 < np.std(nothing) < 17
    assert excess(range(100, 164), range(64)) == MAX_EXCESS


def test_a_contribution_without_weight_moves_nothing_and_is_in_the_set(tmp_path_factory):
    homes, (one, two, three) = all_trained(tmp_path_factory)
    session = homes[2].session
    fold = [session.answer(FoldRequest(Round(0), members)).state for members in ((one, two), (one, two, three))]
    weightless = msgspec.structs.replace(three, weight=0)
    assert session.answer(FoldRequest(Round(0), (one, two, weightless))).state == fold[0] != fold[1]
    nothing = tuple(msgspec.structs.replace(each, weight=0) for each in (one, two))
    assert session.answer(FoldRequest(Round(0), nothing)).state == session.started().state
    # Its own work is in the final set: it does not come back through the error feedback.
    before = session._feedback.residual_C4096.clone()
    session.answer(FinalizeRequest(Round(0), (one, two, weightless)))
    assert torch.equal(session._feedback.residual_C4096, before)
    assert session._feedback.pending == ()


def test_losses_of_many_windows_are_those_of_each_alone(trained, monkeypatch):
    session = trained[0][0].session
    learner, view, data = session._learner, session._fold.view_C4096, session._data
    monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", 5 * AUDITED.model.context)
    found, sizes = data.batch(np.arange(13)), []
    one_by_one = [learner.evaluate(view, window[None], 0).val_loss for window in found]
    forward = learner.module.forward
    monkeypatch.setattr(learner.module, "forward", lambda t, *more: sizes.append(len(t)) or forward(t, *more))
    assert np.allclose(learner.window_losses(view, found), one_by_one, rtol=1e-5, atol=1e-6)
    assert sizes == [5, 5, 3], "few at once"
    assert learner.window_losses(view, found[:0]) == []
