"""The rules with momentum: against plain integers, on a quadratic, and as a fold over sets that change."""

from functools import partial

import pytest
import torch
from msgspec.structs import replace

from atoll.node.learning.outer.fixed import plus
from atoll.node.learning.outer.rules.choice import rule_of
from atoll.protocols.errors import Divergence
from atoll.protocols.run.arena import Span
from atoll.protocols.run.run_spec import MOMENTA
from tests.node.learning.outer.conftest import DirectFold, World, pattern
from tests.node.worker.session_home import SPEC

RULES = sorted(MOMENTA)
CO2 = {"stale_256": 200, "clip_65536": 1200}
GOLDEN = {
    "co2": "59d279093303f7edd884d00e44df2e57dcf623e751426b005389f9643a19bf44",
    "nesterov": "f140804d0556923b7478edba15bf0f0f0c190a033c2e9c0d05b161536e587a0d",
    "slowmo": "f8165949cfc67cf9d0964755e855903143c394a24f9ea44a35ce7aeda99ee8a1",
}
"""State digest after three rounds of `World`; changes only with a rule's arithmetic, which needs a new name."""


def rule(name, alpha=179, beta=230, threads=1):
    more = CO2 if name == "co2" else {}
    found = rule_of(replace(SPEC.outer, rule=name, alpha_256=alpha, momentum_256=beta, **more), threads)
    assert found is not None
    return found


def towards_zero(value):
    return abs(value) // 256 * (1 if value >= 0 else -1)


def plain(name, state, update, alpha, beta):
    """One value of each array in Python's integers, as the docstrings say it."""
    (theta, v, *stale), mean = state, -update
    v = towards_zero(beta * v) + (towards_zero(200 * stale[0]) if stale else mean)
    v = min(max(v, -1200 * 256), 1200 * 256) if stale else v
    top, low = (alpha * (256 * mean + beta * v), 1 << 16) if name == "nesterov" else (alpha * v, 256)
    size = (2 * abs(top) + low) // (2 * low)
    return theta - (size if top >= 0 else -size), v, *([mean] if stale else [])


def world_fold(world, name, **more):
    """A fold of the world's payloads with a rule; U is given with α = 1."""
    state = torch.cat([world.theta, *[torch.zeros_like(world.theta)] * MOMENTA[name]])
    onto = World.__new__(World)
    onto.__dict__.update(world.__dict__, mean=partial(world.mean.func, alpha_256=256, floor_256=64))
    return DirectFold(state, world.arena, onto.onto, lambda _: world.cover, rule=rule(name, **more))


def parts(world, salts):
    return [world.part(salt) for salt in salts]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_a_step_is_that_of_plain_integers_on_the_cover_and_nothing_elsewhere(name, threads):
    state = (torch.cat([pattern(7, 1 + at) for at in range(1 + MOMENTA[name])]) * 2**27).to(torch.int32)
    cover = (Span(1, 3), Span(4, 7))
    rows = [1, 2, 4, 5, 6]
    update = (pattern(5, 3) * 2**27).to(torch.int32)
    update[0, :9] = torch.arange(-4, 5)
    state[8, :9] = torch.arange(-4, 5)  # small ones of both signs, where the rounding shows
    out = rule(name, threads=threads).step(state, state[rows] + update, cover)
    for first, row in enumerate(rows):
        for col in (*range(12), 977, 4095):
            before, after = state[row::7, col].tolist(), out[row::7, col].tolist()
            assert tuple(after) == plain(name, before, int(update[first, col]), 179, 230)
    for row in (0, 3, 7, 10):
        assert torch.equal(out[row], state[row])


@pytest.mark.parametrize("name", RULES)
def test_a_momentum_without_gradient_ends_and_theta_stands(name):
    """The fixed point: to the nearest, a momentum of four steps would stay four for ever."""
    state = torch.zeros((1 + MOMENTA[name], 4096), dtype=torch.int32)
    state[1:] = torch.arange(-2048, 2048) * 4096
    for _ in range(200):
        state = rule(name).step(state, state[:1], (Span(0, 1),))
    assert not state[1:].any()
    assert torch.equal(rule(name).step(state, state[:1], (Span(0, 1),)), state)


@pytest.mark.parametrize("name", RULES)
def test_on_a_quadratic_theta_comes_to_the_least_point_and_stays(name):
    """Δ is a fifth of the way to the target: what members send whose loss is a quadratic around it."""
    target = (pattern(1, 5) * 2**24).to(torch.int32)
    state = torch.zeros((1 + MOMENTA[name], 4096), dtype=torch.int32)
    for _ in range(400):
        update = ((target - state[:1]).double() / 5).round().to(torch.int32)
        state = rule(name, 64, 200).step(state, state[:1] + update, (Span(0, 1),))
    assert int((state[:1] - target).abs().max()) <= 16
    assert int(state[1:].abs().max()) <= 16


@pytest.mark.parametrize("name", RULES)
def test_what_leaves_the_range_is_divergence_and_never_wraps(name):
    state = torch.full((1 + MOMENTA[name], 4096), 2**31 - 9, dtype=torch.int32)
    state[1:] *= -1 if name == "co2" else 1  # what it adds is of the round before
    for sign in (1, -1):
        with pytest.raises(Divergence, match="left its range"):
            rule(name, 1024, 255).step(state * sign, (state * sign)[:1] - sign * 2**27, (Span(0, 1),))


@pytest.mark.parametrize("name", RULES)
def test_the_golden_trajectory(world, name):
    fold = world_fold(world, name)
    for number, salts in enumerate([(0, 1), (2, 3, 4), (5,)]):
        fold.finalize(number, parts(world, salts))
    assert fold.state_digest().hex() == GOLDEN[name]


@pytest.mark.parametrize("name", RULES)
def test_the_state_depends_on_the_sets_and_not_on_when_they_came(world, name):
    """Sets grow, rounds come in any order, and become final early or late: views and states are the same."""
    sets = [(0, 1), (2, 3), (4, 5)]
    plain_fold = world_fold(world, name)
    wanted = [plain_fold.finalize(number, parts(world, salts)) for number, salts in enumerate(sets)]
    late = world_fold(world, name, threads=2)
    late.set_round(1, parts(world, [2]))
    late.set_round(0, parts(world, [1]))
    in_order = world_fold(world, name)
    in_order.set_round(0, parts(world, [1]))
    in_order.set_round(1, parts(world, [2]))
    assert late.view_digest() == in_order.view_digest(), "round 0 came after round 1"
    late.set_round(2, parts(world, sets[2]))
    late.set_round(0, parts(world, sets[0]))
    late.set_round(1, parts(world, [3, 2]))
    assert late.view_digest() == wanted[-1]
    assert late.check(0, parts(world, sets[0])) == wanted[0]
    for number, salts in enumerate(sets):
        assert late.finalize(number, parts(world, salts)) == wanted[number]
        assert late.view_digest() == wanted[-1]
    assert torch.equal(late.view_C4096, late.final_state_S4096[: world.arena.chunks])


@pytest.mark.parametrize("name", RULES)
def test_a_provisional_set_leaves_no_momentum_behind(world, name):
    """A final set that differs from the provisional one, and an empty one, which is no step."""
    fold, other = world_fold(world, name), world_fold(world, name)
    fold.set_round(0, parts(world, [0, 1, 2]))
    fold.set_round(1, parts(world, [3]))
    assert fold.finalize(0, parts(world, [1])) == other.finalize(0, parts(world, [1]))
    assert fold.finalize(1, []) == other.finalize(1, []) == other.state_digest()
    assert fold.view_digest() == other.view_digest()
    assert fold.finalize(2, parts(world, [4])) == other.finalize(2, parts(world, [4]))


@pytest.mark.parametrize("name", RULES)
def test_who_joins_late_has_the_momentum_from_the_state(world, name):
    source, joined = world_fold(world, name), world_fold(world, name)
    source.finalize(0, parts(world, [0, 1]))
    joined.adopt(source.final_state_S4096, 0)
    assert joined.state_digest() == source.state_digest()
    assert joined.finalize(1, parts(world, [2])) == source.finalize(1, parts(world, [2]))
    bare = torch.cat([source.final_C4096, *[torch.zeros_like(source.final_C4096)] * MOMENTA[name]])
    source.adopt(bare, 1)
    assert source.state_digest() != joined.state_digest(), "the momentum is part of the digest"
    with pytest.raises(Divergence, match="a state of shape"):
        joined.adopt(source.final_C4096, 1)


def test_rules_without_momentum_are_the_plain_fold():
    for rule in ("sgd", "average"):
        assert rule_of(replace(SPEC.outer, rule=rule)) is None
    found = rule_of(replace(SPEC.outer, rule="nesterov", alpha_256=179))
    assert found is not None
    assert (found.alpha_256, found.beta_256) == (179, 230)


def test_without_momentum_slowmo_is_sgd():
    state = (torch.cat([pattern(2, 1), torch.zeros((2, 4096))]) * 2**24).to(torch.int32)
    update = (pattern(2, 3) * 2**20).to(torch.int32)
    cover = (Span(0, 2),)
    for name in ("nesterov", "slowmo"):
        out = rule(name, 256, 0).step(state, state[:2] + update, cover)
        assert torch.equal(out[:2], plus(state[:2], update))


def test_co2_moves_by_the_mean_of_the_round_before_and_no_value_beyond_the_clip():
    found = rule_of(replace(SPEC.outer, rule="co2", alpha_256=256))
    assert found is not None
    assert (found.beta_256, found.more) == (128, (256, 1 << 24)), "the defaults of its code"
    first, second = ((pattern(1, salt) * 2**20).to(torch.int32) for salt in (1, 2))
    state, cover = torch.zeros((3, 4096), dtype=torch.int32), (Span(0, 1),)
    state = found.step(state, state[:1] + first, cover)
    assert not state[0].any(), "the first round moves nothing yet"
    state = found.step(state, state[:1] + second, cover)
    assert torch.equal(state[:1], first), "the step of the round before, whatever this round's is"
    half = found._replace(more=(128, 1 << 24)).step(state, state[:1], cover)
    assert torch.allclose((half - state)[0].double(), (second[0] + first[0]).double() / 2, atol=2)
    tight = found._replace(more=(256, 1000)).step(state, state[:1], cover)
    assert int((tight - state)[0].abs().max()) == int(tight[1].abs().max()) == 1000
