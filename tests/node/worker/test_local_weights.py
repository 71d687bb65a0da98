"""Local weights and their anchor: nothing trained is lost, the order of folds leaves no trace but rounding."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.checkpoint.local import check_saved
from atoll.node.learning.compress.encoding import blank_payload, encode_rows
from atoll.node.learning.model.decoder import Decoder
from atoll.node.learning.outer.fixed import clear, padding_of, to_fixed, to_float
from atoll.node.worker.local_weights import LocalWeights, carries
from atoll.protocols.errors import CorruptFault
from atoll.protocols.ledger.coverage import cover_of, rest_of
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.payload import Layout
from atoll_bench.delayed import LateRule
from atoll_bench.module_values import fill_module, read_module
from tests.node.worker.session_home import SPEC

torch.set_num_threads(1)
GOLDEN = Path(__file__).parents[2] / "golden" / "late.json"
ARENA = arena_of(SPEC.model)
LAWS = settings(max_examples=25, deadline=None)


def spec_of(fragments=1, overlap_steps=1, keep_256=256, late=msgspec.UNSET):
    outer = msgspec.structs.replace(
        SPEC.outer, fragments=fragments, overlap_steps=overlap_steps, keep_256=keep_256, late=late
    )
    return msgspec.structs.replace(SPEC, outer=outer)


def noise(seed, size=1e-2):
    values = torch.randn((ARENA.chunks, 4096), generator=torch.Generator().manual_seed(seed)) * size
    return clear(values, padding_of(ARENA))


VIEW = to_fixed(noise(0, 0.02))


class World:
    """Weights that start at VIEW; what the inner optimiser does to them is noise."""

    def __init__(self, **options):
        self.spec = spec_of(**options)
        self.module = Decoder(self.spec.model)
        self.weights = LocalWeights(self.module, self.spec)
        self.weights.start(VIEW)

    def local(self):
        return read_module(self.module, ARENA).detach()

    def train(self, seed):
        fill_module(self.module, self.local() + noise(seed), ARENA)

    def send(self, number):
        for span in cover_of(self.spec, number):
            self.weights.mark_sent(span, self.weights.rows(span))
        self.weights.sent = number

    def rows(self, number):
        return [chunk for span in cover_of(self.spec, number) for chunk in range(span.start, span.stop)]


def test_weights_that_did_not_move_become_exactly_the_view():
    world = World(keep_256=77)
    world.train(1)
    world.send(0)
    view = VIEW + to_fixed(noise(2))
    world.weights.merge(view, arrived=True)
    assert torch.equal(world.local(), to_float(view))
    assert torch.equal(world.weights.anchor_C4096, to_float(view))


@pytest.mark.parametrize("keep_256", [0, 128, 256])
def test_a_share_of_what_was_trained_in_flight_stays(keep_256):
    world = World(keep_256=keep_256)
    world.train(1)
    world.send(0)
    world.train(2)
    view = VIEW + to_fixed(noise(3))
    world.weights.merge(view, arrived=False)
    assert torch.allclose(world.local(), to_float(VIEW) + noise(1) + noise(2), atol=1e-6), "left alone in flight"
    world.weights.merge(view, arrived=True)
    assert torch.allclose(world.local(), to_float(view) + keep_256 / 256 * noise(2), atol=1e-6)
    assert world.weights.sent == -1


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("keep_256", [0, 128, 256])
def test_a_blend_is_that_of_the_bench_on_what_was_in_flight(keep_256, fragments):
    world = World(keep_256=keep_256, fragments=fragments, late="blend")
    world.train(1)
    world.send(0)
    world.train(2)
    view, before = VIEW + to_fixed(noise(3)), world.local()
    rule, fresh = LateRule("blend", keep_256 / 256), to_float(view)
    rows = world.rows(0)
    others = sorted(set(range(ARENA.chunks)) - set(rows))
    world.weights.merge(view, arrived=True)
    wanted = rule.merged(before[rows], torch.zeros(()), fresh[rows])
    assert torch.allclose(world.local()[rows], wanted, atol=1e-6)
    assert torch.allclose(world.local()[others], (fresh + noise(1) + noise(2))[others], atol=1e-6), "not sent yet"
    assert torch.equal(world.weights.anchor_C4096, fresh)
    assert world.weights.sent == -1


@pytest.mark.parametrize("late", ["rebase", "blend"])
def test_on_a_quadratic_view_and_local_weights_come_to_the_least_point_and_stay(late):
    """One member whose steps go a quarter of the way; it takes two of them while each round is under way."""
    world, target, view = World(keep_256=128, late=late), noise(7), VIEW

    def step():
        fill_module(world.module, world.local().lerp(target, 0.25), ARENA)

    for number in range(60):
        for _ in range(4):
            step()
        delta = world.weights.anchor_C4096 - world.local()
        world.send(number)
        for _ in range(2):
            step()
        view = view - to_fixed(delta)
        world.weights.merge(view, arrived=True)
    # Steps of 2⁻²⁴, and float32 of weights below 0.1.
    assert float((to_float(view) - target).abs().max()) < 1e-5
    assert float((world.local() - target).abs().max()) < 1e-5


def golden():
    """View and local weights after each of six rounds on a quadratic: the content of tests/golden/late.json."""
    return {late: _on_a_quadratic(late) for late in ("rebase", "blend")}


def _on_a_quadratic(late):
    world, target, view = World(keep_256=128, late=late), noise(7), VIEW
    found = []
    for number in range(6):
        for _ in range(3):
            fill_module(world.module, world.local().lerp(target, 0.25), ARENA)
        delta = world.weights.anchor_C4096 - world.local()
        world.send(number)
        fill_module(world.module, world.local().lerp(target, 0.25), ARENA)
        view = view - to_fixed(delta + noise(number, 2e-3))  # another member's work is in it
        world.weights.merge(view, arrived=True)
        rows = (to_float(view)[0, :3], world.local()[0, :3])
        found.append([round(float(value), 6) for row in rows for value in row])
    return found


def test_golden_trajectory_of_late_folds():
    recorded, found = json.loads(GOLDEN.read_text()), golden()
    assert recorded.keys() == found.keys()
    assert recorded["rebase"] != recorded["blend"]
    for late, rounds in recorded.items():
        for mine, values in zip(found[late], rounds, strict=True):
            assert mine == pytest.approx(values, abs=2e-6)


@pytest.mark.parametrize("keep_256", [0, 256])
def test_a_view_that_moves_carries_unsent_work_along(keep_256):
    world = World(keep_256=keep_256)
    world.train(1)
    view = VIEW.clone()
    view[3] += 1000
    before = world.local()
    world.weights.merge(view, arrived=True)
    after = world.local()
    others = [chunk for chunk in range(ARENA.chunks) if chunk != 3]
    assert torch.equal(after[others], before[others]), "chunks whose view did not move keep their bits"
    assert torch.allclose(after[3], to_float(view)[3] + noise(1)[3], atol=1e-6)


def test_chunks_outside_the_cover_are_not_in_flight():
    world = World(fragments=2, keep_256=0)
    world.train(1)
    world.send(1)
    world.train(2)
    world.weights.merge(VIEW + 500, arrived=True)
    sent = world.rows(1)
    kept = [chunk for span in rest_of(cover_of(world.spec, 1), ARENA.chunks) for chunk in range(*span)]
    local, fresh = world.local(), clear(to_float(VIEW + 500), padding_of(ARENA))
    assert torch.allclose(local[sent], fresh[sent], atol=1e-6)
    assert torch.allclose(local[kept], (fresh + noise(1) + noise(2))[kept], atol=1e-6)


@LAWS
@given(
    st.permutations(range(4)),
    st.integers(0, 256),
    st.integers(1, 2),
    st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_the_order_in_which_the_view_moves_leaves_no_trace_but_rounding(order, keep, fragments, looked):
    """Moves before and after the arrival of what is in flight, merged one by one or together."""
    moves = [to_fixed(noise(10 + at, 1e-3)) for at in range(4)]
    ends = []
    for one_by_one in (True, False):
        world = World(fragments=fragments, keep_256=keep)
        world.train(1)
        world.send(0)
        world.train(2)
        view = VIEW
        for at in order if one_by_one else ():
            view = view + moves[at]
            if at == 0 or looked[at]:  # move 0 is the fold of what is in flight
                world.weights.merge(view, arrived=at == 0)
        world.weights.merge(VIEW + sum(moves), arrived=True)
        ends.append(world.local())
    assert torch.allclose(*ends, atol=1e-6)


@pytest.mark.parametrize("is_older", [False, True], ids=["", "format 1"])
@pytest.mark.parametrize("fragments", [1, 2])
def test_saved_and_loaded_weights_go_on_as_if_nothing_had_happened(fragments, is_older):
    steady, other = World(fragments=fragments, keep_256=100), World(fragments=fragments, keep_256=100)
    steady.train(1)
    steady.send(1)
    steady.train(2)
    saved = {name: value.clone() for name, value in steady.weights.tensors().items()}
    if is_older:  # which had the anchor of all chunks
        saved = {name: value for name, value in saved.items() if not name.startswith("anchor")}
        saved["anchor"] = steady.weights.anchor_C4096.clone()
    check_saved(saved, other.spec)
    other.weights.load(saved, steady.weights.sent, b"", VIEW)
    for world in (steady, other):
        world.weights.merge(VIEW + 300, arrived=True)
    assert torch.equal(steady.local(), other.local())
    assert torch.equal(steady.weights.anchor_C4096, other.weights.anchor_C4096)


def test_weights_of_which_all_is_sent_are_not_saved():
    """A restart begins with the view: nothing is lost but the place where its first steps begin."""
    world, other = World(keep_256=100), World(keep_256=100)
    world.train(1)
    assert world.weights.tensors()
    world.send(0)
    assert world.weights.tensors() == {}
    other.weights.sent = 0
    other.train(2)
    other.weights.merge(VIEW + 300, arrived=True)
    gained = other.local() - clear(to_float(VIEW + 300), padding_of(ARENA))
    assert torch.allclose(gained, noise(2) * 100 / 256, atol=1e-6)


@pytest.mark.parametrize("fault", ["missing", "shape", "nan"])
def test_saved_weights_that_cannot_be_used_are_refused(fault):
    world = World()
    world.train(1)
    saved = {name: value.clone() for name, value in world.weights.tensors().items()}
    name = sorted(saved)[-1]
    if fault == "missing":
        del saved[name]
    elif fault == "shape":
        saved[name] = saved[name].reshape(-1)[1:]
    else:
        saved[name].view(-1)[-1] = float("nan")
    with pytest.raises(CorruptFault, match=name):
        check_saved(saved, world.spec)


def test_the_module_is_lent_and_comes_back():
    world = World()
    world.train(1)
    before, anchor = world.local(), world.weights.anchor_C4096.clone()

    def fail():
        with world.weights.replaced_by(VIEW + 9):
            assert torch.equal(world.local(), clear(to_float(VIEW + 9), padding_of(ARENA)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(world.local(), before)
    assert torch.equal(world.weights.anchor_C4096, anchor)


def moved_by_encoding(weights):
    """L as an encoder reads it where it stands: it becomes the anchor."""
    anchor, residual = torch.zeros((2, ARENA.chunks, 4096))
    layout = Layout("int8", ARENA.chunks, 4096)
    encode_rows(blank_payload(layout), layout, 0, residual, anchor, weights.blocks((Span(0, ARENA.chunks),)), 0.0)
    return anchor


def test_blocks_are_the_weights_of_now_in_whatever_module_they_are():
    world = World()
    assert torch.equal(moved_by_encoding(world.weights), world.local())
    world.train(1)
    assert torch.equal(moved_by_encoding(world.weights), world.local()), "vectors are copied again"
    left, world.module = world.module, Decoder(world.spec.model)
    world.weights.move_to(world.module, b"", world.weights.trained())
    fill_module(left, torch.zeros_like(world.local()), ARENA)
    world.train(2)
    assert world.local().any()
    assert torch.equal(moved_by_encoding(world.weights), world.local()), "of the module it moved to"


def test_rows_are_copies():
    world = World()
    world.weights.rows(Span(0, 2)).zero_()
    assert world.local()[:2].any()


def test_weights_are_carried_over_a_restart_only_where_they_are_more_than_the_view():
    assert not carries(spec_of(1, 0))
    assert carries(spec_of(2, 0))
    assert carries(spec_of(1, 3))
