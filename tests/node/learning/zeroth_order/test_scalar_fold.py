"""The fold of scalars: the bits of its definition, any order and threads, its bounds, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.learning.outer.fixed import state_digest
from atoll.node.learning.zeroth_order.directions import perturb, walsh_row, walsh_sums
from atoll.node.learning.zeroth_order.scalar_fold import ScalarStep, apply_scalars, read_scalars, write_scalars
from atoll.protocols.errors import DecodeError, Divergence
from atoll.protocols.run.payload import HEADER_BYTES, MAX_SCALARS, Layout
from atoll.protocols.run.sections.zeroth_order import MAX_UNIT, seed_of
from tests.plain import scalars as plain

GOLDEN = Path(__file__).parents[3] / "golden" / "scalars.json"
CHUNKS, K = 2, 8
LAYOUT = Layout("scalar", CHUNKS, K)
STEP = ScalarStep(200, 12345)
SEEDS = st.integers(0, 2**64 - 1)
MEMBERS = st.lists(
    st.tuples(st.integers(1, 255), SEEDS, st.lists(st.integers(-127, 127), max_size=K)), min_size=1, max_size=4
)


def theta_of(salt=0, chunks=CHUNKS):
    at = np.arange(chunks * 4096, dtype=np.int64).reshape(chunks, 4096)
    return ((at + 977 * salt) * 2654435761 % 4294967296 % (1 << 25)) - (1 << 24)


def folded(theta, members, step=STEP, layout=LAYOUT, threads=1):
    payloads = [bytes(write_scalars(scalars, layout)) for _, _, scalars in members]
    weights, seeds = [weight for weight, _, _ in members], [seed for _, seed, _ in members]
    values = torch.from_numpy(theta.astype(np.int32))
    return apply_scalars(values, weights, payloads, seeds, layout, step, threads=threads)


@settings(max_examples=12, deadline=None)
@given(MEMBERS, st.integers(1, 1024), st.integers(1, MAX_UNIT))
def test_the_fold_has_the_bits_of_its_definition_in_any_order(members, alpha_256, unit):
    theta, step = theta_of(), ScalarStep(alpha_256, unit)
    found = folded(theta, members, step)
    assert np.array_equal(found.numpy(), plain.moved(theta, members, alpha_256, unit))
    assert torch.equal(folded(theta, members[::-1], step, threads=2), found)


def test_the_largest_set_keeps_the_bit_budget():
    layout = Layout("scalar", 1, MAX_SCALARS)
    most = [127] * MAX_SCALARS
    theta = np.zeros((1, 4096), np.int64)
    found = folded(theta, [(255, 7, most)] * 1024, ScalarStep(1024, MAX_UNIT), layout)
    # Equal members: the mean is one member, whose sum of Walsh functions is all in every 512th value.
    size = (2 * 1024 * MAX_UNIT * 127 * MAX_SCALARS + (1 << 14)) // (1 << 15)
    whole = plain.direction(7, 0, 1)[0, ::512]
    assert found[0, ::512].tolist() == (-size * whole).tolist()
    assert int((found != 0).sum()) == 8
    with pytest.raises(DecodeError, match="too many members"):
        folded(theta, [(1, 7, [1])] * 1025, STEP, layout)
    for weight in (0, 256):
        with pytest.raises(DecodeError, match="illegal weight"):
            folded(theta, [(weight, 7, [1])], STEP, layout)


def test_a_weight_that_leaves_its_range_is_divergence():
    theta = np.full((CHUNKS, 4096), 2**31 - 1, np.int64)
    with pytest.raises(Divergence):
        folded(theta, [(1, 7, [127])], ScalarStep(256, MAX_UNIT))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "payload of 19 bytes where 20 are legal"),
        (lambda data: data + b"\0", "payload of 21 bytes where 20 are legal"),
        (lambda data: data[:HEADER_BYTES] + b"\x80" + data[HEADER_BYTES + 1 :], "a scalar that nobody writes"),
        (lambda data: data[:5] + b"\x01" + data[6:], r"codec 1 \(sparse2\); the run's is 6 \(scalar\)"),
        (lambda data: data[:6] + b"\x09" + data[7:], "k 9; the run's is 8"),
        (lambda data: data[:8] + b"\x03" + data[9:], "chunks 3; 2 are legal"),
    ],
)
def test_illegal_bytes_are_refused(change, words):
    data = bytes(write_scalars([1, -127, 127], LAYOUT))
    assert read_scalars(data, LAYOUT).tolist() == [1, -127, 127, 0, 0, 0, 0, 0]
    with pytest.raises(DecodeError, match=words):
        read_scalars(change(data), LAYOUT)


@given(st.binary(max_size=40))
def test_any_bytes_are_scalars_or_one_refusal(data):
    try:
        found = read_scalars(data, LAYOUT)
    except DecodeError:
        return
    assert bytes(write_scalars(found.tolist(), LAYOUT)) == data


def test_directions_of_a_round_are_signs_orthogonal_and_of_no_other_author():
    drawn = [plain.direction(seed_of(b"run", 3, author), step, 1) for author in "ab" for step in range(4)]
    products = np.array([[int((one * other).sum()) for one in drawn] for other in drawn])
    assert (np.diag(products) == 4096).all()
    assert not (products[:4, :4] - np.diag([4096] * 4)).any(), "of one author and round: orthogonal"
    assert abs(products[:4, 4:]).max() < 6 * 64, "of two authors: as far apart as independent ones, 6 σ"
    assert abs(sum(each.sum() for each in drawn)) < 6 * 64 * 8**0.5
    assert seed_of(b"run", 3, "a") != seed_of(b"run", 4, "a") != seed_of(b"ruN", 4, "a")


def test_what_a_step_trains_with_is_the_view_moved_by_its_direction():
    theta, seed, step, spread = theta_of(), 11, 5, 2.0**-10
    shift = (spread * walsh_row(step)).astype(np.float32)
    out = np.empty((1, 4096), np.float32)
    perturb(theta[1:].astype(np.int32), 1, np.uint64(seed), shift, out)
    wanted = theta[1:] * 2.0**-24 + spread * plain.direction(seed, step, 2)[1:]
    assert np.array_equal(out, wanted.astype(np.float32))
    rows = np.array([walsh_row(t) for t in range(MAX_SCALARS)])
    assert np.array_equal(walsh_sums(np.arange(3)), rows[1] + 2 * rows[2])


def test_a_quadratic_descends_and_its_minimum_is_a_fixed_point():
    """f = Σ λ(θ − 1/4)²/2, two members; nothing but scalars is exchanged."""
    layout, step = Layout("scalar", 1, 64), ScalarStep(256, 16384)
    slope = 1.0 + np.arange(4096) % 4
    theta, lengths = np.zeros((1, 4096), np.int64), []

    def scalars(now, seed):
        local, sent, first = now / 2.0**24, [], plain.direction(seed, 0, 1)
        for at in range(64):
            z = first * np.tile(walsh_row(at), 8)
            value = 4e-5 * float((slope * (local - 0.25) * z).sum()) / (step.unit * 2.0**-30)
            sent.append(int(np.clip(round(value), -127, 127)))
            local = local - sent[-1] * step.unit * 2.0**-30 * z
        return sent

    for number in range(6):
        seeds = [seed_of(b"quadratic", number, author) for author in ("a", "b")]
        theta = folded(theta, [(64, seed, scalars(theta, seed)) for seed in seeds], step, layout).numpy()
        theta = theta.astype(np.int64)
        lengths.append(float((slope * (theta / 2.0**24 - 0.25) ** 2).sum()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.97 * lengths[0]
    least = np.full((1, 4096), 1 << 22, np.int64)
    sent = [(64, 9, scalars(least, 9))]
    assert not any(sent[0][2])
    assert np.array_equal(folded(least, sent, step, layout).numpy(), least)


def golden():
    """The content of tests/golden/scalars.json."""
    seed = seed_of(bytes(range(32)), 3, "12D3KooWExample")
    members = [(64, seed, [1, -127, 127, 0, 5]), (255, seed_of(bytes(32), 3, "other"), [9] * K)]
    theta, states = theta_of(), []
    for _ in range(3):
        moved = folded(theta, members)
        states.append(state_digest(moved).hex())
        theta = moved.numpy().astype(np.int64)
    return {
        "seed": f"{seed:016x}",
        "first words of its signs": [f"{plain.word(seed, at):016x}" for at in range(2)],
        "payload": bytes(write_scalars(members[0][2], LAYOUT)).hex(),
        "trajectory": states,
    }


def test_golden_bytes_and_trajectory():
    assert golden() == json.loads(GOLDEN.read_text())
