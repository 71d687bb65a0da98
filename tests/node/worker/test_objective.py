"""A term of the loss in whole steps: parts, several devices, packages, a golden trajectory, one digest."""

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from atoll.node.config.roles import Work
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model.bridge import write_atoms
from atoll.node.learning.model.decoder import loss_of
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.model.lora import load_base
from atoll.node.runs.installed_parts import check_installed
from atoll.node.runs.presets import preset
from atoll.node.worker.multi_device.replica import ALL_STORED, Replica, StepMemory
from atoll.node.worker.objectives.step_term import objective_of
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, peer_id_of
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    CheckRequest,
    EvaluateRequest,
    FinalizeRequest,
    SnapshotReply,
    SnapshotRequest,
)
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.sections.objective import BUILT_IN, ObjectiveSpec
from atoll_bench.inner_steps import run_steps
from tests.node.learning.inner.test_inner import inner_spec
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member
from tests.node.worker.term_package import install

GOLDEN = Path(__file__).parents[2] / "golden" / "objective.json"
MODEL = ModelSpec(
    dim=64, layers=2, heads=2, kv_heads=1, ffn=64, vocab=96, context=8, tied=True, rope_theta=1e4, norm_eps=1e-5
)
SIGREG = ObjectiveSpec(name="sigreg.1", weight=0.5, settings=(("directions", 32.0),))
SQUARES = ObjectiveSpec(name="squares.1", weight=0.25, package="atoll-squares")
WITH_TERM = replace(SPEC, objective=SIGREG)
STEPS = inner_spec(batch=5, lr=5e-3, clip=100.0)


def run_of(objective=SIGREG, **model):
    made = preset("tiny", peer_id_of(bytes(range(32))), 1)
    return replace(made, model=replace(MODEL, **model), inner=STEPS, objective=objective)


def replica_of(spec, memory=ALL_STORED):
    slices = spec.model.ffn_slices
    trained = bitmap_of(range(slices), slices) if slices else ALL
    made = Replica(spec, trained, "cpu", (torch.float32, False), memory=memory)
    write_atoms(made.module, first_values(spec.model).items())
    if spec.model.lora_rank:
        load_base(made.module, spec.model, first_values(spec.model.base).__getitem__)
    return made


def first_values(model):
    return {name: torch.from_numpy(value).float() * 2.0**-24 for name, value in genesis(model, 1).items()}


def windows_of(step, count=5):
    return np.random.default_rng(step).integers(0, MODEL.vocab, (count, MODEL.context + 1))


def gradients(made, window, at=3):
    loss = made.inner.passes.run(torch.from_numpy(window), lambda: made.inner._begin(at))
    return float(loss), {name: p.grad.double().clone() for name, p in made.module.named_parameters()}


MODELS = {"dense": {}, "slices": {"ffn": 128, "ffn_slices": 2}, "adapters": {"lora_rank": 4, "lora_alpha": 8.0}}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("memory", [StepMemory(1), StepMemory(2, True), StepMemory(3)])
def test_parts_of_a_step_have_the_gradient_of_the_whole(memory, model):
    """The statistic is no sum over tokens: parts that only saw themselves would have another one."""
    window, spec = windows_of(1), run_of(**MODELS[model])
    loss, whole = gradients(replica_of(spec), window)
    plain = gradients(replica_of(replace(spec, objective=msgspec.UNSET)), window)[1]
    assert any(not torch.allclose(value, plain[name], rtol=0.01) for name, value in whole.items())
    again, found = gradients(replica_of(spec, memory), window)
    assert again == pytest.approx(loss, rel=1e-5)
    for name, expected in whole.items():
        assert torch.allclose(found[name], expected, rtol=1e-3, atol=1e-5 * float(expected.norm())), name


def test_the_term_reaches_the_gradient_of_the_last_hidden_states():
    plain, with_term = (gradients(replica_of(run_of(of)), windows_of(1)) for of in (msgspec.UNSET, SIGREG))
    made = replica_of(run_of())
    made.inner._begin(3)
    hidden = made.module(torch.from_numpy(windows_of(1))[:, :-1], None, lambda x, _: x).flatten(0, 1)
    term = made.inner.passes._loss_of.__self__._term
    loss = 0.5 * objective_after(made, hidden)
    assert float(term(hidden, lambda here: here).detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    assert with_term[0] - plain[0] == pytest.approx(float(loss.detach()), rel=1e-4)
    loss.backward()
    for name, parameter in made.module.named_parameters():
        added = with_term[1][name] - plain[1][name]
        assert torch.allclose(added, parameter.grad.double(), rtol=1e-3, atol=1e-5 * float(added.norm())), name


def objective_after(made, hidden):
    return made.inner.passes._loss_of.__self__._objective.term(hidden, lambda here: here)


def test_a_step_draws_by_its_number_whatever_happened_before():
    first, again, later = replica_of(run_of()), replica_of(run_of()), replica_of(run_of())
    gradients(again, windows_of(2), at=9)
    found = [gradients(made, windows_of(1), at)[0] for made, at in ((first, 3), (again, 3), (later, 4))]
    assert found[0] == found[1] != found[2]


def test_a_validation_is_cross_entropy_alone(tmp_path):
    plain, with_term = (Home(tmp_path / str(at), spec=spec) for at, spec in enumerate((SPEC, WITH_TERM)))
    losses = [home.ask(EvaluateRequest()).val_loss for home in (plain, with_term)]
    assert losses[0] == losses[1]
    module = replica_of(run_of()).module
    assert evaluate(module, loss_of, windows_of(1), 1).val_loss < 6


def golden():
    """Losses of twelve steps: the content of tests/golden/objective.json."""
    torch.set_num_threads(1)
    return {
        name: [round(loss, 4) for loss in run_steps(replica_of(spec).inner.step, windows_of, 0, 12)]
        for name, spec in {"sigreg": run_of(), "tied": run_of(tied=False), "plain": run_of(msgspec.UNSET)}.items()
    }


def test_golden_trajectory():
    """Up to the order of float sums, which machines choose."""
    recorded, found = json.loads(GOLDEN.read_text()), golden()
    assert recorded.keys() == found.keys()
    for name, losses in recorded.items():
        assert found[name] == pytest.approx(losses, abs=1e-3)


def test_a_kill_and_a_late_join_give_one_digest(tmp_path):
    homes = [Home(tmp_path / str(at), peer, WITH_TERM) for at, peer in enumerate((ME, OTHER))]
    states = set()
    for number in range(2):
        members = tuple(member(home.train(number).pending, home.start.peer) for home in homes)
        states = {home.ask(FinalizeRequest(Round(number), members)).state for home in homes}
        assert len(states) == 1
    assert homes[1].restart().state in states
    reply = homes[0].ask(SnapshotRequest(str(tmp_path / "snapshot")))
    assert isinstance(reply, SnapshotReply)
    late = Home(tmp_path / "late", Identity(bytes([3]) * 32).peer_id, WITH_TERM)
    late.ask(AdoptRequest(reply.round, reply.path, reply.state, ()))
    homes.append(late)
    members = tuple(member(home.train(2).pending, home.start.peer) for home in homes)
    seen = {home.ask(CheckRequest(Round(2), members)).state for home in homes}
    seen |= {home.ask(FinalizeRequest(Round(2), members)).state for home in homes}
    assert len(seen) == 1


@pytest.mark.parametrize("shard", [False, True], ids=["copies", "parts"])
def test_two_devices_take_the_steps_of_one(tmp_path, shard):
    """They have two and three of the five sequences, and the mean over all of them."""
    spec = replace(WITH_TERM, inner=replace(SPEC.inner, batch=5, eps=1e-4))
    one, two = Home(tmp_path / "one", spec=spec), Home(tmp_path / "two", spec=spec, device="cpu,cpu", shard=shard)
    alone, together = one.train(0), two.train(0)
    assert together.pending.loss == pytest.approx(alone.pending.loss, abs=1e-4)
    values = [home.session._learner.weights.trained() for home in (one, two)]
    for name, value in values[0].items():
        assert torch.allclose(values[1][name], value, rtol=1e-4, atol=2e-5), name
    two.session.close()


# --- packages -------------------------------------------------------------------------------


def test_a_term_of_a_package_is_found_by_its_entry_point_and_trains(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    spec = run_of(SQUARES)
    check_installed(run_of(SQUARES), Work())
    made, plain = replica_of(spec), replica_of(run_of(msgspec.UNSET))
    first = made.inner.step(windows_of(0), 0) - plain.inner.step(windows_of(0), 0)
    assert first == pytest.approx(0.25, rel=1e-3), "the states are normed, and gains begin at 1"
    for step in range(1, 12):
        made.inner.step(windows_of(step), step)
        plain.inner.step(windows_of(step), step)
    gains = [float(of.module.model.norm.weight.detach().square().mean()) for of in (made, plain)]
    assert gains[0] < gains[1] - 0.02


def test_a_package_that_is_not_here_is_named_in_one_line():
    with pytest.raises(ConfigError, match=r"needs the objective squares\.1, which is not installed") as caught:
        check_installed(run_of(SQUARES), Work())
    assert "if you trust the package atoll-squares, install it" in caught.value.hint
    with pytest.raises(ConfigError, match="not installed here"):
        objective_of(run_of(SQUARES))


def test_who_trains_nothing_needs_no_package(tmp_path):
    spec = replace(WITH_TERM, objective=SQUARES)
    home = Home(tmp_path / "home", spec=spec, trains=False)
    assert home.ask(EvaluateRequest()).val_loss > 0
    with pytest.raises(ConfigError, match="not installed here"):
        Home(tmp_path / "other", spec=spec)


def test_another_version_of_a_term_is_another_term(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"squares\.2, which is not installed here"):
        check_installed(run_of(replace(SQUARES, name="squares.2")), Work())


BROKEN = [
    ("import nowhere_to_be_found\n", "does not load: ModuleNotFoundError: No module named"),
    ("raise RuntimeError('no')\n", "does not load: RuntimeError: no"),
    ("", "does not load: AttributeError"),
]


@pytest.mark.parametrize(("source", "said"), BROKEN)
def test_a_package_that_does_not_load_is_one_line(tmp_path, monkeypatch, source, said):
    install(tmp_path, monkeypatch, source=source)
    with pytest.raises(ConfigError, match=said) as caught:
        objective_of(run_of(SQUARES))
    assert "\n" not in str(caught.value)


def test_a_setting_that_a_package_does_not_have_is_refused_when_a_node_starts(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    spec = replace(WITH_TERM, objective=replace(SQUARES, settings=(("power", 3.0),)))
    with pytest.raises(ConfigError, match=r"squares\.1 has no setting power"):
        Home(tmp_path / "home", spec=spec)


def test_a_term_that_is_no_scalar_is_refused(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, reduce="")
    with pytest.raises(ConfigError, match=r"squares\.1 gave a tensor of shape \(40,\), no scalar"):
        replica_of(run_of(SQUARES)).inner.step(windows_of(0), 0)


def test_two_packages_with_one_name_are_refused_and_a_built_in_term_cannot_be_replaced(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    install(tmp_path, monkeypatch, package="atoll-others", module="other_squares")
    with pytest.raises(
        ConfigError, match=r"several installed packages bring squares\.1: atoll-others, atoll-squares"
    ):
        check_installed(run_of(SQUARES), Work())
    install(tmp_path, monkeypatch, package="atoll-evil", module="evil", name="sigreg.1")
    assert type(objective_of(run_of())).__module__ == "atoll.node.learning.objectives.sigreg"
    assert "evil" not in sys.modules


def test_every_built_in_term_is_here():
    for name in BUILT_IN:
        assert objective_of(run_of(replace(SIGREG, name=name, settings=())))
