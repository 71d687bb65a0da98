"""Rules of aggregation as functions of integers: what they clip and weigh, and what they never exceed."""

from fractions import Fraction
from math import isqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.outer.aggregation import WHOLE, Aggregation, atoms_of, limits, sampled
from atoll.node.learning.outer.judging import (
    RULES,
    cosines,
    distances2,
    groups,
    krum,
    nearest,
    nnm,
    rfa,
    shares_of,
    threshold,
    weighted_median,
)
from atoll.node.runs.presets import preset, with_adamw
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.run.arena import Span
from tests.plain.sparse2 import decode, encode

torch.set_num_threads(1)
FAR = 1 << 200
ONE = np.zeros(1, np.int32)
NAMES = ["clip", *RULES]


def spec_of(rule="clip", name="tiny", **outer):
    spec = preset(name, Identity(bytes(32)).peer_id, 1)
    return replace(spec, outer=replace(spec.outer, aggregate=rule, **outer), reduce=None)


def judge_of(rule, atom_C, limits=None, seed=0, by_weight=False):
    weigh = None if rule == "clip" else RULES[rule]
    return Aggregation(weigh, 64, atom_C, limits or [FAR] * (int(atom_C.max()) + 1), seed, by_weight=by_weight)


def gram_of(vectors):
    rows = np.asarray(vectors, np.int64)
    return rows @ rows.T


# --- clipping ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1 << 90), min_size=1, max_size=12), st.integers(0, 1 << 80))
def test_nothing_is_longer_than_the_median_of_those_who_sent_nor_than_the_limit(norms, limit):
    left = judge_of("clip", ONE, [limit]).clip(0, [1] * len(norms), norms)
    sent = sorted(norm for norm in norms if norm)
    bound = min(limit, sent[len(sent) // 2]) if sent else 0
    for norm, clip in zip(norms, left, strict=True):
        assert 0 <= clip <= WHOLE
        assert norm * clip**2 <= bound * WHOLE**2 or (clip == WHOLE and norm <= bound)
        assert clip == WHOLE or (clip + 1) ** 2 * norm > bound * WHOLE**2


@pytest.mark.parametrize(("count", "liars"), [(3, 1), (4, 1), (5, 2), (10, 4), (20, 9)])
def test_fewer_than_half_neither_raise_the_median_above_the_honest_nor_push_it_below_them(count, liars):
    honest = [100 + at for at in range(count - liars)]
    judge = judge_of("clip", ONE)
    for lie in (1, 1 << 80):
        left = judge.clip(0, [64] * count, [*honest, *[lie] * liars])
        lengths = [isqrt(norm * clip**2 // WHOLE**2) for norm, clip in zip(honest, left, strict=False)]
        assert min(lengths) >= 9
        assert (lie * left[-1] ** 2) // WHOLE**2 <= max(honest)


@pytest.mark.parametrize(("weights", "clipped"), [([64] * 5 + [16] * 16, False), ([64] * 4 + [16] * 17, True)])
def test_newcomers_with_less_than_half_of_the_weight_clip_nobody(weights, clipped):
    """By number they are most, so without the key the members' work is as short as theirs."""
    norms = [10_000 if weight == 64 else 1 for weight in weights]
    left = judge_of("clip", ONE, by_weight=True).clip(0, weights, norms)
    assert left == [WHOLE // 100 if clipped and weight == 64 else WHOLE for weight in weights]
    assert judge_of("clip", ONE).clip(0, weights, norms)[0] == WHOLE // 100


def test_a_claim_above_the_nominal_work_has_no_more_votes():
    """Three of ten that claim four times as much would have most of the votes."""
    norms, weights = [100] * 7 + [1] * 3, [64] * 7 + [255] * 3
    assert judge_of("clip", ONE, by_weight=True).clip(0, weights, norms) == [WHOLE] * 10


@given(st.lists(st.tuples(st.integers(0, 1 << 90), st.integers(1, 9)), min_size=1, max_size=12))
def test_a_vote_is_like_a_contribution_of_its_own(drawn):
    values = np.array([value for value, _ in drawn], object)
    each = sorted(value for value, votes in drawn for _ in range(votes))
    assert weighted_median(values, np.array([votes for _, votes in drawn])) == each[len(each) // 2]


def test_two_members_of_different_length_do_not_clip_each_other():
    assert judge_of("clip", ONE).clip(0, [64, 64], [1, 400]) == [WHOLE, WHOLE]


def test_the_limit_is_what_the_peak_rate_can_move():
    spec = spec_of(most_256=512)
    atom_C, atoms = atoms_of(spec.model, cover_of(spec, 0))
    steps = Fraction(spec.steps(9) * spec.pace.most_256, 256)
    most = int(2 * steps * Fraction(spec.inner.lr) * (1 << 26))
    assert limits(spec, 9, [atoms[atom_C[0]]]) == [most * most * 256 * 128]  # the embeddings
    early, late = (limits(spec, number, atoms) for number in (0, 9))
    assert all(a < b for a, b in zip(early, late, strict=True))


def test_each_chunk_has_an_atom_and_each_value_is_in_one():
    spec = spec_of()
    atom_C, atoms = atoms_of(spec.model, cover_of(spec, 0))
    assert len(atom_C) == size_of(cover_of(spec, 0))
    assert atoms[atom_C[-1]].is_rest
    assert sum(atom.values for atom in atoms) == spec.model.parameters


def test_all_matrices_of_an_expert_are_one_atom():
    spec = spec_of("nnm", "moe-smoke")
    _, atoms = atoms_of(spec.model, cover_of(spec, 0))
    experts = [atom for atom in atoms if atom.is_expert]
    assert len(experts) == spec.model.experts.count
    assert {atom.values for atom in experts} == {3 * 128 * 128 * spec.model.layers}


def test_a_fragment_has_the_atoms_of_its_chunks():
    spec = spec_of(fragments=2)
    parts = [atoms_of(spec.model, cover_of(spec, number))[0] for number in (0, 1)]
    whole = atoms_of(spec.model, (Span(0, sum(map(len, parts))),))[0]
    assert not set(parts[0]) & set(parts[1])
    assert sorted([*parts[0], *parts[1]]) == sorted(whole)


# --- whole folds ---------------------------------------------------------------------------------


def payload_of(seed, scale=1e-3, chunks=3):
    return encode(torch.randn((chunks, 4096), generator=torch.Generator().manual_seed(seed)) * scale, 64)


def test_the_limit_of_a_matrix_follows_muons_rate():
    plain = replace(spec_of(), inner=with_adamw(spec_of().inner))
    spec = replace(plain, inner=replace(plain.inner, optimizer="muon", muon_lr=8.0))
    _, atoms = atoms_of(spec.model, cover_of(spec, 9))
    before, found = limits(plain, 9, atoms), limits(spec, 9, atoms)
    ratios = {atom.is_projection: now / old for atom, old, now in zip(atoms, before, found, strict=True)}
    assert ratios == {True: pytest.approx(4.0), False: 1.0}
    assert sum(atom.is_projection for atom in atoms) == 21
    assert not atoms[0].is_projection, "the embeddings"


def update_of(rule, payloads, weights=None, floor_256=64, threads=1, limits=None):
    judge = judge_of(rule, np.array([0, 1, 1], np.int32), limits)
    nothing = torch.zeros((3, 4096), dtype=torch.int32)
    given = weights or [64] * len(payloads)
    step = OuterStep(256, floor_256)
    return codec_of("sparse2", 64).apply_update(nothing, given, payloads, step, judge=judge, threads=threads)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1e-6, 1e-3, 1.0, 1e3])), min_size=1, max_size=9),
    st.integers(1, 256),
    st.integers(1, 3),
)
def test_no_set_moves_an_atom_further_than_the_floor_and_the_median_allow(rule, drawn, floor_256, threads):
    payloads = [payload_of(seed, scale) for seed, scale in drawn]
    update = update_of(rule, payloads, floor_256=floor_256, threads=threads)
    assert torch.equal(update, update_of(rule, payloads, floor_256=floor_256))
    for rows in ([0], [1, 2]):
        lengths = sorted(float((decode(each, 3, 64).q_Ck[rows].double() ** 2).sum()) ** 0.5 for each in payloads)
        moved = float((update[rows].double() ** 2).sum()) ** 0.5 * 4
        allowed = lengths[len(lengths) // 2] * (256 / floor_256) ** 0.5
        assert moved <= allowed * (1 + 1e-4) + 4 * 2 * 64 * len(payloads)  # each value is rounded once


@pytest.mark.parametrize("rule", NAMES)
def test_contributions_that_agree_are_averaged_as_without_a_rule(rule):
    """Shares are equal then, and nothing is clipped: the mean is the mean but for the last unit."""
    common = torch.randn((3, 4096), generator=torch.Generator().manual_seed(99)) * 1e-3
    made = [
        encode(common + torch.randn((3, 4096), generator=torch.Generator().manual_seed(at)) * 5e-4, 64)
        for at in range(3)
    ]
    found, mean = update_of(rule, made).double(), update_of("clip", made).double()
    plain = codec_of("sparse2", 64).apply_update(
        torch.zeros((3, 4096), dtype=torch.int32), [64] * 3, made, OuterStep(256, 64)
    )
    for each, most in ((found, 0.15 if rule == "flag" else 0.1), (mean, 0.1)):  # of three, flag favours two
        assert float((each - plain).norm() / plain.double().norm()) < most


@pytest.mark.parametrize("rule", NAMES)
@pytest.mark.parametrize("liars", [1, 2, 3])
def test_liars_do_not_turn_the_step(rule, liars):
    """Ten members who share a direction, and up to three of them that send it the wrong way, a hundred times."""
    common = torch.randn((3, 4096), generator=torch.Generator().manual_seed(99)) * 1e-3
    noise = [torch.randn((3, 4096), generator=torch.Generator().manual_seed(at)) * 1e-3 for at in range(10)]
    honest = [encode(common + each, 64) for each in noise]
    lies = [encode(-100 * (common + each), 64) for each in noise[:liars]]
    good = update_of("clip", honest).double().flatten()
    found = update_of(rule, [*lies, *honest[liars:]]).double().flatten()
    assert float(good @ found / good.norm() / found.norm()) > 0.5
    plain = codec_of("sparse2", 64).apply_update(
        torch.zeros((3, 4096), dtype=torch.int32), [64] * 10, [*lies, *honest[liars:]], OuterStep(256, 64)
    )
    assert float(good @ plain.double().flatten()) < 0


@pytest.mark.parametrize("rule", NAMES)
def test_a_member_alone_cannot_exceed_the_limit(rule):
    update = update_of(rule, [payload_of(1, 1e3)], limits=[1 << 40, 1 << 42])
    assert float((update[0].double() ** 2).sum()) ** 0.5 * 4 == pytest.approx(2**20, rel=1e-2)
    assert float((update[1:].double() ** 2).sum()) ** 0.5 * 4 == pytest.approx(2**21, rel=1e-2)


def test_the_seed_chooses_the_chunks_and_all_chunks_can_be_chosen():
    assert [sampled(4, 64, 1000, seed).tolist() for seed in (0, 7)] == [list(range(1000))] * 2
    found = [sampled(64, 64, 6400, seed) for seed in range(100)]
    assert {len(each) for each in found} <= {len(found[0]), len(found[0]) + 1, len(found[0]) - 1}
    assert len(found[0]) < 1000
    assert sorted(set(np.concatenate(found).tolist())) == list(range(6400))
    assert len(sampled(1024, 64, 40, 5)) == 40


# --- weights -------------------------------------------------------------------------------------


def has_equal_scores(gram) -> bool:
    """Whether two have the same sum of distances to their neighbours, as the nearest two have to one neighbour."""
    seen = []

    def score(gram_NN, liars, vote_N):
        seen.append(np.sort(distances2(gram_NN), axis=1)[:, : max(2, len(gram_NN) - liars - 1)].sum(axis=1))
        return krum(gram_NN, liars)

    shares_of(score, gram, 64)
    return any(len({*map(int, found)}) < len(found) for found in seen)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_shares_follow_the_contributions_and_are_bounded(rule, data):
    count = data.draw(st.integers(1, 12))
    scale = 1 << data.draw(st.integers(0, 26))
    drawn = data.draw(
        st.lists(st.lists(st.integers(-9, 9), min_size=5, max_size=5), min_size=count, max_size=count)
    )
    gram = gram_of(drawn) * scale
    shares = shares_of(RULES[rule], gram, 64)
    assert shares.shape == (count,)
    assert (shares >= 0).all()
    assert shares.any()
    assert int(shares.max()) < 1 << 32
    assert (judge_of(rule, ONE).weights(np.full(count, 255), gram) <= 255).all()
    # Without ties the order cannot matter; `flag` sums floats, in the order that all nodes have.
    if (
        rule != "flag"
        and len({tuple(row) for row in drawn}) == count
        and not (rule == "krum" and has_equal_scores(gram))
        and len(set(gram.flatten().tolist())) == count * (count + 1) // 2
    ):
        order = data.draw(st.permutations(range(count)))
        assert (shares_of(RULES[rule], gram[np.ix_(order, order)], 64) == shares[order]).all()


@pytest.mark.parametrize("rule", RULES)
def test_the_largest_set_does_not_overflow(rule):
    """1,024 members: each product and sum stays as it is in Python's own integers."""
    rng = np.random.default_rng(1)
    rows = rng.integers(-30, 30, (1024, 40))
    gram = rows @ rows.T * (1 << 44)
    assert int(gram.max()) > 1 << 58
    for votes in (None, np.full(1024, 64) - (np.arange(1024) == 5)):
        shares = shares_of(RULES[rule], gram, 64, votes)
        assert (shares >= 0).all()
        assert 0 < int(shares.sum()) < 1 << 42


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_where_all_weigh_the_same_the_key_changes_no_bit(rule, data):
    count, weight = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 255))
    rows = data.draw(
        st.lists(st.lists(st.integers(-9, 9), min_size=4, max_size=4), min_size=count, max_size=count)
    )
    weights, gram = np.full(count, weight), gram_of(rows) << data.draw(st.integers(0, 26))
    found = judge_of(rule, ONE, by_weight=True)
    before = judge_of(rule, ONE)
    assert found.weights(weights, gram).tolist() == before.weights(weights, gram).tolist()
    norms = gram.diagonal().tolist()
    assert found.clip(0, weights.tolist(), norms) == before.clip(0, weights.tolist(), norms)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_by_weight_weights_are_legal_and_do_not_follow_from_one_vote_each(rule, data):
    count = data.draw(st.integers(1, 12))
    rows = data.draw(
        st.lists(st.lists(st.integers(-9, 9), min_size=5, max_size=5), min_size=count, max_size=count)
    )
    weights = np.array(data.draw(st.lists(st.integers(1, 255), min_size=count, max_size=count)))
    found = judge_of(rule, ONE, by_weight=True).weights(weights, gram_of(rows) << 26)
    assert (found >= 0).all()
    assert found.max() == 255


def progress(members, newcomers, by_weight, common=24):
    """The fold's part along the members' mean, of what they have alone; newcomers send noise of full length."""
    rng = np.random.default_rng(3)
    honest = rng.integers(-100, 100, (members, 2000)) + rng.integers(-common, common, 2000)
    rows = np.concatenate([honest, rng.integers(-100, 100, (len(newcomers), 2000))])
    weights = np.array([64] * members + newcomers)
    final = judge_of("nnm", ONE, by_weight=by_weight).weights(weights, gram_of(rows))
    alone = honest.mean(axis=0)
    return final @ rows @ alone / final.sum() / (alone @ alone)


@pytest.mark.parametrize("members", [4, 8, 15])
def test_noise_of_newcomers_with_a_quarter_of_the_weight_moves_next_to_nothing(members):
    newcomers = [64 * members // 3 // 16] * 16
    assert progress(members, newcomers, by_weight=True) > 0.88
    assert progress(members, newcomers, by_weight=True) > progress(members, newcomers, by_weight=False) + 0.03


def test_members_that_share_a_direction_are_no_copies_beside_noise():
    """By number most cosines are those of noise: all members would be one group, with one vote."""
    assert progress(24, [16] * 20, by_weight=False, common=130) < 0.3
    assert progress(24, [16] * 20, by_weight=True, common=130) > 0.93


def test_near_copies_with_fewer_votes_take_nothing_from_a_contribution():
    honest = np.random.default_rng(2).integers(-50, 50, (7, 300))
    rows = np.concatenate([honest, np.repeat(honest[:1], 9, axis=0)])
    found = judge_of("nnm", ONE, by_weight=True).weights(np.array([64] * 7 + [16] * 9), gram_of(rows))
    alone = judge_of("nnm", ONE, by_weight=True).weights(np.array([64] * 7), gram_of(honest))
    share = (found[0] + found[7:].sum()) / found.sum()
    assert share == pytest.approx(alone[0] / alone.sum(), abs=0.03)
    assert share > 0.1


def test_copies_count_once():
    honest = np.random.default_rng(2).integers(-50, 50, (7, 30))
    rows = np.concatenate([honest, honest[:1], honest[:1], honest[:1]])
    shares = shares_of(nnm, gram_of(rows), 0)
    assert groups(gram_of(rows)).tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 0]
    assert shares[[0, 7, 8, 9]].sum() == pytest.approx(shares[1], abs=4)


def test_what_is_near_follows_from_the_round():
    assert threshold(np.full((3, 3), 4096)) == int(0.9 * 4096)
    assert threshold(np.zeros((6, 6), np.int64)) == int(0.35 * 4096)
    alike = np.full((8, 8), 2000)
    assert threshold(alike) == 2000
    alike[1, 0], alike[2, 0] = 4000, 4000
    assert threshold(alike) == 2000
    spread = np.tril(np.arange(64).reshape(8, 8) * 10)
    assert threshold(spread) > 1000


def test_cosines_are_rounded_down_and_of_nothing_are_0():
    assert cosines(gram_of([[3, 4], [6, 8], [-4, 3], [0, 0]])).tolist() == [
        [4096, 4096, 0, 0],
        [4096, 4096, 0, 0],
        [0, 0, 4096, 0],
        [0, 0, 0, 0],
    ]


def test_the_nearest_are_mixed_and_the_far_one_is_in_no_other_mixture():
    gram = gram_of([[10, 0], [11, 1], [9, 1], [-50, 0]])
    assert nearest(gram, 1).tolist() == [[1, 1, 1, 0]] * 3 + [[1, 0, 1, 1]]
    shares = nnm(gram, 1)
    assert shares[3] < shares[:3].min() / 50


def test_what_is_empty_has_no_vote():
    rows = [[10, 0], [11, 1], [9, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    for rule in RULES.values():
        shares = shares_of(rule, gram_of(rows), 64)
        assert not shares[3:].any()
        assert shares[:3].all()


@pytest.mark.parametrize("rule", ["nnm", "krum"])
def test_what_is_short_and_points_backwards_is_not_near_to_all(rule):
    """Honest contributions are far apart: against their mean, and shorter than they, is within their diameter."""
    rng = np.random.default_rng(5)
    common = rng.integers(-40, 40, 4000)
    honest = rng.integers(-100, 100, (8, 4000)) + common
    lie = -honest.sum(axis=0) // 8
    rows = np.concatenate([honest, [lie]])
    distances = np.linalg.norm(rows[:, None] - rows, axis=2)
    assert distances[8, :8].max() < np.max(distances[:8, :8])
    shares = shares_of(RULES[rule], gram_of(rows), 64)
    assert shares[8] < shares[:8].min() / 3 or not shares[8]


def test_krum_leaves_out_the_far_ones():
    assert krum(gram_of([[10, 0], [11, 1], [9, 1], [-50, 0]]), 1).tolist() == [1, 1, 1, 0]


def test_the_geometric_median_is_near_the_many():
    shares = rfa(gram_of([[1000, 0], [1010, 10], [990, 10], [-5000, 0]]), 1)
    assert shares[3] < shares[:3].min() / 50


def test_nothing_to_compare_means_equal_shares():
    for rule in RULES.values():
        assert len(set(shares_of(rule, np.zeros((5, 5), np.int64), 64).tolist())) == 1
