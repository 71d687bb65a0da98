"""A worker that trains some of the experts: what it sends, keeps and takes over when others become its own."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.model.bridge import frozen_names, named_atoms
from atoll.node.learning.outer.fixed import to_float
from atoll.node.worker.learner import experts_among
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import cover_of, payload_size, rest_of, size_of, slabs
from atoll.protocols.local.worker_messages import (
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    InheritReply,
    InheritRequest,
    TrainRequest,
    VerifyReply,
    VerifyRequest,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, expert_of
from atoll.protocols.run.moments import moments_bytes
from atoll.protocols.run.run_spec import Stage
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member
from tests.plain.arena import scatter

E = 4
MIXTURE = ModelSpec(
    dim=64, layers=2, heads=2, kv_heads=1, ffn=128, vocab=256, context=16, tied=True, rope_theta=1e4,
    norm_eps=1e-5, experts=ExpertsSpec(count=E, per_token=2, ffn=64),
)  # fmt: skip
SLICED = msgspec.structs.replace(MIXTURE, experts=None, ffn=64 * E, ffn_slices=E)
LOW, HIGH = bitmap_of({0, 1}, E), bitmap_of({2, 3}, E)
STEPS = 3


@pytest.fixture(autouse=True, params=[MIXTURE, SLICED], ids=["experts", "ffn_slices"])
def model(request):
    """Everything here holds for FFN slices of a dense model too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "MODEL", request.param)
        yield


def spec_of(holders=1, overlap_steps=0, fragments=1, experts=None, optimizer="adamw"):
    model = msgspec.structs.replace(MIXTURE, experts=experts) if experts else globals()["MODEL"]
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, STEPS),), holders=holders, overlap_steps=overlap_steps, fragments=fragments
    )
    inner = msgspec.structs.replace(SPEC.inner, optimizer=optimizer)
    return msgspec.structs.replace(SPEC, model=model, outer=outer, inner=inner)


class Node(Home):
    def train_some(self, number, experts, after=-1):
        slot, slots = (0, 1) if self.start.peer == ME else (1, 2)
        *_, trained = self.session.train(TrainRequest(Round(number), slot, slots, STEPS, after, experts, ahead=2))
        self.keep(number)
        return trained.pending

    @property
    def learner(self):
        return self.session._learner

    def view(self):
        return to_float(self.session._fold.view_C4096)


def part(pending, author=ME):
    """With a payload that outlasts its author's own round."""
    copy = Path(pending.path).with_suffix(".copy")
    shutil.copy(pending.path, copy)
    return msgspec.structs.replace(member(pending, author), experts=pending.experts, path=str(copy))


def rows(cover):
    return [chunk for span in cover for chunk in range(*span)]


@pytest.fixture
def nodes(tmp_path):
    return lambda name, spec, peer=ME: Node(tmp_path / name, peer, spec)


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_mixture_that_everybody_trains_whole_is_as_any_other_model(nodes, overlap_steps):
    spec = spec_of(0, overlap_steps)
    one, two = nodes("a", spec), nodes("b", spec, OTHER)
    for number in range(3):
        found = (part(one.train(number).pending), part(two.train(number).pending, OTHER))
        states = {node.ask(FinalizeRequest(Round(number), found)).state for node in (one, two)}
        assert len(states) == 1
        assert one.restart().state in states
    assert one.learner.experts == ALL


@pytest.mark.parametrize("fragments", [1, 3])
def test_two_that_share_the_experts_have_one_state_and_send_what_they_train(nodes, fragments):
    spec = spec_of(1, fragments=fragments)
    one, two = nodes("a", spec), nodes("b", spec, OTHER)
    for number in range(2 * fragments):
        pendings = one.train_some(number, LOW), two.train_some(number, HIGH)
        sizes = {(one.path / "spool" / f"{pendings[0].payload.hex()}.payload").stat().st_size}
        assert sizes == {payload_size(spec, number, LOW)}
        found = (part(pendings[0]), part(pendings[1], OTHER))
        before = one.view()
        assert len({node.ask(FinalizeRequest(Round(number), found)).state for node in (one, two)}) == 1
        moved = set(torch.nonzero((one.view() != before).any(1)).flatten().tolist())
        assert moved <= set(rows(cover_of(spec, number)))
        for experts in (LOW, HIGH):
            alone = rows(rest_of(cover_of(spec, number, LOW if experts is HIGH else HIGH), len(before)))
            assert fragments > 1 or moved & set(alone), "each half moved"


def test_what_memory_ran_out_with_is_remembered_when_experts_change_hands(nodes):
    node = nodes("a", spec_of())
    node.train_some(0, LOW)
    node.learner.inner.passes.micro_batch = 1
    node.learner.module.recompute_layers()
    node.train_some(1, HIGH)
    assert node.learner.inner.passes.micro_batch == 1
    assert node.learner.module.is_recomputed


def test_who_trains_nothing_of_an_expert_sends_nothing_of_it(nodes):
    spec = spec_of()
    node = nodes("a", spec)
    pending = node.train_some(0, LOW)
    assert pending.experts == LOW
    before = node.view()
    node.ask(FoldRequest(Round(0), (part(pending),)))
    still = rows(rest_of(cover_of(spec, 0, LOW), len(before)))
    assert torch.equal(node.view()[still], before[still])
    assert not node.residual()[still].any()


def test_a_payload_is_verified_as_what_it_is_said_to_cover(nodes):
    node = nodes("a", spec_of())
    pending = node.train_some(0, LOW)
    assert node.ask(VerifyRequest(pending.path, Round(0), LOW)) == VerifyReply()
    for experts in (ALL, bitmap_of({2}, E)):
        with pytest.raises(DecodeError):
            node.ask(VerifyRequest(pending.path, Round(0), experts))


@pytest.mark.parametrize("fragments", [1, 3])
def test_what_missed_its_final_set_returns_to_the_rows_that_it_covered(nodes, fragments):
    spec = spec_of(fragments=fragments)
    node, other = nodes("a", spec), nodes("b", spec, OTHER)
    missed = node.train_some(0, LOW)
    before, cover = node.residual(), cover_of(spec, 0, LOW)
    said = torch.zeros((size_of(cover), 4096))
    codec_of(spec.compress.codec, spec.compress.k).give_back(said, Path(missed.path).read_bytes())
    node.ask(FinalizeRequest(Round(0), (part(other.train_some(0, HIGH), OTHER),)))
    for at, span in slabs(cover, 64):
        before[span.start : span.stop] += said[at : at + span.stop - span.start]
    assert torch.equal(node.residual(), before)


def moments(node):
    return {name: value.clone() for name, value in node.learner.inner.state().items()}


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_when_others_become_its_own_it_keeps_weights_and_moments_of_what_stays(nodes, overlap_steps):
    spec = spec_of(1, overlap_steps)
    node = nodes("a", spec)
    pending = node.train_some(0, LOW)
    node.ask(FoldRequest(Round(0), (part(pending),)))
    before, weights = moments(node), {n: v.clone() for n, v in node.learner.weights.trained().items()}
    node.learner.set_trained_experts(bitmap_of({1, 2}, E))
    after = moments(node)
    for name, value in after.items():
        if expert_of(name) == 2:
            assert not value.any()
        else:
            assert torch.equal(value, before[name])
    assert not any(expert_of(name) == 0 for name in after)
    steps = {name: int(value) for name, value in after.items() if name.startswith("step/")}
    assert all(count == (0 if expert_of(name) == 2 else STEPS) for name, count in steps.items())
    for name, value in node.learner.weights.trained().items():
        if expert_of(name) != 2:
            assert torch.equal(value, weights[name])
    arena, held = arena_of(spec.model), node.learner.weights
    anchor, seen = scatter(held.anchor_C4096, arena), scatter(held._view_C4096, arena)
    atoms = named_atoms(node.learner.module)
    for name, value in seen.items():
        if expert_of(name) in (0, 2):
            assert torch.equal(atoms[name], to_float(value)), "as of the last view"
    assert all(torch.equal(atoms[n], value) for n, value in anchor.items() if expert_of(n) == 2)
    assert not any(value.any() for n, value in anchor.items() if expert_of(n) == 0)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_an_expert_that_comes_late_moves_as_in_a_first_step(nodes, beta2):
    base = spec_of()
    rates = {"beta2": beta2, "weight_decay": 0.0, "warmup_steps": 0, "lr": 1e-4, "lr_min": 1.0}
    node = nodes("a", msgspec.structs.replace(base, inner=msgspec.structs.replace(base.inner, **rates)))
    for number in range(5):
        node.train_some(number, LOW)
    learner = node.learner
    learner.set_trained_experts(bitmap_of({1, 2}, E))
    before = {name: value.clone() for name, value in learner.weights.trained().items()}
    window = node.session._data.batch(np.arange(2))
    learner.inner.step(window, 5 * STEPS)
    moved = {n: (v - before[n]).abs() for n, v in learner.weights.trained().items() if expert_of(n) == 2}
    assert max(float(value.max()) for value in moved.values()) <= 1e-4 * 1.01
    sizes = torch.cat([value[value > 0] for value in moved.values()])
    assert float(sizes.median()) >= 1e-4 * 0.98, "neither 0.45 nor 3.2 of the rate"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_of_what_is_given_up_are_a_file_and_another_node_goes_on_from_it(nodes, optimizer):
    spec = spec_of(optimizer=optimizer)
    one, two = nodes("a", spec), nodes("b", spec, OTHER)
    one.train_some(0, LOW)
    kept = moments(one)
    *_, trained = one.session.train(TrainRequest(Round(1), 0, 2, STEPS, -1, bitmap_of({1}, E)))
    (parted,) = trained.parted
    assert parted.expert == 0
    data = Path(parted.path).read_bytes()
    assert len(data) == moments_bytes(spec.model, spec.inner.optimizer)
    two.train_some(0, HIGH)
    assert two.ask(InheritRequest(0, parted.path)) == InheritReply(False), "not its own yet"
    two.train_some(1, bitmap_of({0, 3}, E))
    alone = moments(two)
    assert two.ask(InheritRequest(0, parted.path)) == InheritReply(True)
    after = moments(two)
    beta = {"exp_avg": spec.inner.beta1**STEPS, "exp_avg_sq": spec.inner.beta2**STEPS}
    if optimizer == "muon":
        beta = {"exp_avg": spec.inner.muon_momentum**STEPS}
    assert {name.split("/")[0] for name in after if expert_of(name) == 0} == {"step", *beta}
    for name, value in after.items():
        kind = name.split("/")[0]
        if expert_of(name) != 0:
            assert torch.equal(value, alone[name])
        elif kind == "step":
            assert value == 2 * STEPS
        else:
            wanted = alone[name] + beta[kind] * kept[name]
            assert torch.allclose(value, wanted, rtol=0.01, atol=float(kept[name].abs().max()) * 0.01)
    two.train_some(2, bitmap_of({0, 3}, E))


def test_files_of_moments_are_swept_and_junk_is_refused(nodes):
    spec = spec_of()
    node = nodes("a", spec)
    node.train_some(0, LOW)
    node.train_some(1, HIGH)
    spool = node.path / "spool"
    assert {path.name for path in spool.glob("*.moments")} == {"1-0.moments", "1-1.moments"}
    node.train_some(2, HIGH)
    assert not list(spool.glob("*.moments"))
    junk = node.path / "junk"
    for data in (
        b"",
        bytes(moments_bytes(spec.model, spec.inner.optimizer)),
        b"\xff" * moments_bytes(spec.model, spec.inner.optimizer),
    ):
        junk.write_bytes(data)
        before = moments(node)
        with pytest.raises(DecodeError):
            node.ask(InheritRequest(2, str(junk)))
        assert all(torch.equal(value, before[name]) for name, value in moments(node).items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_in_eight_bits_are_handed_over_and_survive_a_restart(nodes, optimizer):
    spec = spec_of(optimizer=optimizer)
    node = nodes("a", spec)
    node.start = msgspec.structs.replace(node.start, quantized=True)
    node.restart()
    node.train_some(0, LOW)
    assert any(name.startswith("exp_avg_int8/") for name in moments(node))
    *_, trained = node.session.train(TrainRequest(Round(1), 0, 2, STEPS, -1, bitmap_of({1}, E)))
    node.keep(1)
    (parted,) = trained.parted
    given = node.path / "given"
    shutil.copy(parted.path, given)
    assert len(given.read_bytes()) == moments_bytes(spec.model, optimizer)
    before = moments(node)
    node.restart()
    after = moments(node)
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    node.train_some(2, LOW)
    assert node.ask(InheritRequest(0, str(given))) == InheritReply(True)
    steps = moments(node)["step/model.layers.0.mlp.experts.0.up_proj.weight"]
    assert steps == 2 * STEPS


@pytest.mark.parametrize("frozen", ["float32", "bfloat16", "int8"])
def test_frozen_experts_follow_the_view(nodes, frozen):
    spec = spec_of(1, 2)
    node, other = nodes("a", spec), nodes("b", spec, OTHER)
    node.start = msgspec.structs.replace(node.start, frozen=frozen)
    node.restart()
    found = part(node.train_some(0, LOW)), part(other.train_some(0, HIGH), OTHER)
    node.ask(FoldRequest(Round(0), found))
    evaluated = node.ask(EvaluateRequest())
    node.train_some(1, LOW)
    module = node.learner.module
    assert {expert_of(name) for name in frozen_names(module)} == {2, 3}
    if frozen != "int8":
        view = scatter(node.view(), arena_of(spec.model))
        atoms = named_atoms(module)
        assert all(torch.equal(atoms[n], view[n].to(atoms[n].dtype)) for n in frozen_names(module))
    whole = nodes("c", spec_of(0)).ask(EvaluateRequest())
    assert evaluated.val_loss < whole.val_loss, "the view that is evaluated has learned"


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_a_restart_goes_on_with_the_same_experts_as_if_there_had_been_none(nodes, overlap_steps):
    spec = spec_of(1, overlap_steps)
    ends = []
    for name in ("steady", "shaken"):
        node, pendings = nodes(name, spec), []
        for number, experts in enumerate((LOW, LOW, HIGH, HIGH)):
            pendings.append(node.train_some(number, experts))
            if name == "shaken":
                assert node.restart().experts == experts
            for at in range(number + 1):
                node.ask(FoldRequest(Round(at), (part(pendings[at]),)))
        ends.append([pending.payload for pending in pendings])
    assert ends[0] == ends[1]


def test_the_choice_bias_moves_by_what_the_tokens_did_and_reaches_the_view(nodes):
    experts = ExpertsSpec(count=E, per_token=2, ffn=64, zero=2, computed=1.5, bias_rate=0.01)
    dense = msgspec.structs.replace(SPEC.compress, codec="int8", k=4096)
    spec = msgspec.structs.replace(spec_of(1, experts=experts), compress=dense)
    node = nodes("a", spec)
    node.ask(FoldRequest(Round(0), (part(node.train_some(0, LOW)),)))
    atoms = scatter(node.view(), arena_of(spec.model))
    bias = atoms["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias[:E].any()
    assert not bias[E:].any()
    assert float(bias.abs().max()) <= 0.01 * STEPS + 1e-3


def test_experts_of_a_saved_state_are_named_by_its_tensors():
    assert experts_among(["final", "exp_avg/model.layers.0.mlp.experts.2.up_proj.weight"], spec_of()) == b"\x04"
    assert experts_among(["final"], spec_of()) == b"\x00"
    assert experts_among(["local/model.layers.0.mlp.experts.2.up_proj.weight"], spec_of(0)) == ALL
