"""`atoll bench byzantine`: its members train as a worker does, its liars keep to their own limits."""

import numpy as np
import pytest
import torch

from atoll.node.learning.model import bridge
from atoll.node.learning.model.genesis import genesis
from atoll.node.learning.outer.fixed import to_float
from atoll.node.worker.learner import Learner
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import arena_of
from atoll_bench.byzantine import byzantine
from atoll_bench.byzantine.adaptive import ADAPTIVE, ALL, NAMES
from atoll_bench.byzantine.attacks import Seen, min_angle, min_max
from atoll_bench.byzantine.audit_trial import EACH, IDLERS, AuditTrial
from atoll_bench.byzantine.audits import rows_of
from atoll_bench.byzantine.trial import MEMBERS, STEPS, Case, Members, Trial, spec_of


def test_members_side_by_side_train_as_a_worker_does(data):
    spec = spec_of(Case("mean", None, 0))
    arena = arena_of(spec.model)
    theta = {name: torch.from_numpy(value) for name, value in genesis(spec.model, spec.seed).items()}
    fixed_C4096 = bridge.gather(theta, arena)
    start = {name: torch.empty(value.shape) for name, value in theta.items()}
    bridge.write_rows(start, arena, 0, to_float(fixed_C4096))
    rng = np.random.default_rng(1)
    windows = [data.batch(rng.integers(0, data.num_windows, 2 * 3)) for _ in range(STEPS)]
    both = [torch.from_numpy(each).view(2, 3, -1) for each in windows]
    found = Members(spec, 2).train(start, both, 0)
    for slot in range(2):
        learner = Learner(spec, "cpu")
        learner.weights.start(fixed_C4096)
        for at, each in enumerate(both):
            learner.step(each[slot].numpy(), at)
        for name, value in learner.module.state_dict().items():
            moved = float((value - start[name]).norm())
            assert float((found[name][slot] - value).norm()) <= 0.02 * moved, name


def test_a_liar_costs_the_mean_more_than_the_rule(data):
    losses = {
        (rule, attack): Trial(Case(rule, attack, 3 if attack else 0), data).loss(4)
        for rule in ("mean", "nnm")
        for attack in (None, "scaling")
    }
    assert losses["nnm", None] == pytest.approx(losses["mean", None], rel=0.05)
    assert losses["mean", "scaling"] > 1.1 * losses["mean", None]
    assert losses["nnm", "scaling"] < 1.1 * losses["nnm", None]


def seen_of(liars=2):
    noise = torch.Generator().manual_seed(3)
    common = torch.randn((3, 4096), generator=noise)
    honest = torch.randn((MEMBERS - liars, 3, 4096), generator=noise) + 0.5 * common
    own = torch.randn((liars, 3, 4096), generator=noise) + 0.5 * common
    step = -honest.mean(0)
    return Seen(1, honest, own, honest[0], noise, step, lambda lies: -torch.cat([honest, lies]).mean(0))


@pytest.mark.parametrize("name", ALL)
def test_each_attack_makes_finite_values_for_every_liar(name):
    seen = seen_of()
    lies = ALL[name](seen)
    assert lies.shape == seen.own_LC4096.shape
    assert bool(torch.isfinite(lies).all())


def test_min_max_is_as_far_as_two_honest_members_are():
    seen = seen_of()
    honest, lie = seen.honest_HC4096.flatten(1), min_max(seen)[0].flatten()
    most = torch.cdist(honest, honest).max()
    assert 0.95 * most <= (honest - lie).norm(dim=1).max() <= most * 1.001
    assert float(lie @ honest.mean(0)) < 0


def test_min_max_of_angles_stays_among_the_honest_cosines():
    seen = seen_of()
    honest = torch.nn.functional.normalize(seen.honest_HC4096.flatten(1), dim=1)
    for lie in min_angle(seen):
        cosines = honest @ torch.nn.functional.normalize(lie.flatten(), dim=0)
        assert float(cosines.min()) >= float((honest @ honest.T).min()) - 0.02


def test_rows_are_judged_against_the_mean_without_liars():
    losses = {}
    for seed in (1, 2):
        losses[Case("mean", None, 0, seed, 256)] = 2.0 * seed
        losses[Case("nnm", None, 0, seed, 192)] = 2.01 * seed
        for liars in (1, 2, 3, 4):
            losses[Case("nnm", "noise", liars, seed, 192)] = 2.0 * seed
            losses[Case("nnm", "ALIE", liars, seed, 192)] = (2.02 + 0.04 * liars) * seed
    rows = byzantine.rows_of("nnm", losses, {"mean": 256, "nnm": 192}, (1, 2), ("noise", "ALIE"))
    found = {row.metric: row for row in rows}
    assert found["nnm: no attack"].value == pytest.approx(1.005)
    assert found["nnm: no attack"].passed
    assert found["nnm: worst at 20 %"].value == pytest.approx(1.05)
    assert found["nnm: worst at 20 %"].passed is False
    assert found["nnm: worst at 20 %"].note.startswith("ALIE")
    assert found["nnm: worst at 30 %"].passed
    assert found["nnm: worst at 10 %"].value == pytest.approx(1.03)
    assert found["nnm: worst at 40 %"].value == pytest.approx(1.09)
    assert found["nnm: worst at 40 %"].passed is None


def test_rows_of_unlike_members_are_judged_against_unlike_members():
    losses = {Case("mean", None, 0, 1, 256): 1.0, Case("mean", None, 0, 1, 256, 0.5): 2.0}
    losses[Case("nnm", None, 0, 1, 256, 0.5)] = 2.1
    for liars in (1, 2, 3, 4):
        losses[Case("nnm", "noise", liars, 1, 256, 0.5)] = 2.2
    rates = {"mean": 256, "nnm": 256}
    rows = byzantine.rows_of("nnm", losses, rates, (1,), ("noise",), dirichlet=0.5)
    found = {row.metric: row for row in rows}
    assert found["nnm, Dirichlet 0.5: no attack"].value == pytest.approx(1.05)
    assert found["nnm, Dirichlet 0.5: no attack"].passed is False
    assert found["nnm, Dirichlet 0.5: worst at 20 %"].value == pytest.approx(1.1)


def test_attacks_are_chosen_by_how_their_names_begin():
    assert byzantine.chosen_attacks("") == NAMES
    assert byzantine.chosen_attacks("ALIE,adaptive") == ("ALIE", *ADAPTIVE)
    with pytest.raises(ConfigError, match="no attack 'ALEI'"):
        byzantine.chosen_attacks("noise,ALEI")


def test_shares_of_liars_are_chosen_by_their_percents():
    assert list(byzantine.chosen_shares("")) == [10, 20, 30, 40]
    assert list(byzantine.chosen_shares("40,10")) == [10, 40]
    with pytest.raises(ConfigError, match="no share of '15' %"):
        byzantine.chosen_shares("10,15")


@pytest.mark.slow(
    slice=(
        "test_rows_of_audited_runs_show_the_worst_seed, "
        "tests/node/virtual/test_virtual_audits.py::test_all_nodes_take_the_weight_of_who_does_nothing"
    )
)
def test_an_audited_run_counts_who_has_no_weight(data):
    trial = AuditTrial(1, data)
    found = trial.outcome(2)
    assert found.idle.keys() == set(IDLERS)
    assert not any(found.idle.values())
    assert found.honest == []
    assert found.usual > 0.5, "honest work shows"
    said = [verdict for each in trial._sets[1] for verdict in each.verdicts]
    assert 5 * EACH <= len(said) <= 8 * EACH, "those that work say something of the first round"


def test_rows_of_audited_runs_show_the_worst_seed():
    never = {name: [] for name in IDLERS}
    first = {"idle": never | {"copier": [7, 9]}, "honest": [], "usual": 2.0}
    second = {"idle": never | {"copier": [12, 13]}, "honest": [5, 6], "usual": 3.0}
    rows = {row.metric: row for row in rows_of([first, second], 24)}
    copier, noise = (rows[f"audits: {name} has no weight from round"] for name in ("copier", "noise"))
    assert (copier.value, noise.value, copier.passed) == (12, 24, False)
    lost = rows["audits: rounds of honest members without weight"]
    assert (lost.value, lost.passed) == (2, False)
    assert "of 384" in lost.note
