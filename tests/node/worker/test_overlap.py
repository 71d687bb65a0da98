"""Rounds that overlap and rounds of fragments in whole sessions: agreement, waiting, and what a restart keeps."""

from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint.local import LocalBody, begin_local
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.errors import CorruptFault, DecodeError, Divergence
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import cover_of, payload_size, rest_of
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    EvaluateRequest,
    FinalizeRequest,
    FoldRequest,
    SnapshotRequest,
    TrainProgress,
    TrainReply,
    VerifyReply,
    VerifyRequest,
)
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec, Stage
from atoll_bench.module_values import read_module
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member, said

ARENA = arena_of(SPEC.model)
STEPS = 4


def spec_of(fragments: int = 1, overlap_steps: int = 0, keep_256: int = 256) -> RunSpec:
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, STEPS),),
        fragments=fragments, overlap_steps=overlap_steps, keep_256=keep_256,
    )  # fmt: skip
    return msgspec.structs.replace(SPEC, outer=outer)


@pytest.fixture
def homes(tmp_path: Path) -> Callable[..., Home]:
    return lambda name, spec, peer=ME: Home(tmp_path / name, peer, spec)


def drain(steps: Iterator[object]) -> tuple[int, TrainReply | None]:
    """Steps until the round ends or waits; the result, if it ended."""
    for taken, event in enumerate(steps):
        if not isinstance(event, TrainProgress):
            return taken, event
    raise AssertionError("the round ended without a result")


def local(node: Home) -> torch.Tensor:
    return read_module(node.session._learner.module, ARENA).detach().clone()


def anchor(node: Home) -> torch.Tensor:
    return node.session._learner.weights.anchor_C4096.clone()


def view(node: Home) -> torch.Tensor:
    return node.session._fold.view_C4096


def rows(spec: RunSpec, number: int, *, outside: bool = False) -> list[int]:
    cover = cover_of(spec, number)
    spans = rest_of(cover, ARENA.chunks) if outside else cover
    return [chunk for span in spans for chunk in range(span.start, span.stop)]


@pytest.mark.parametrize("tau", [0, 1, 3, STEPS, 9])
def test_a_round_waits_for_its_fold_after_the_steps_that_are_allowed(homes, tau):
    node = homes("a", spec_of(overlap_steps=tau))
    first = node.train(0)
    assert (first.overlapped, first.held_s) == (0, 0.0)
    steps = node.events(1, after=0)
    for _ in range(3):  # asked again and again, it takes no step more
        taken, ended = drain(steps)
        assert ended is None
        assert taken in (0, min(tau, STEPS))
    node.ask(EvaluateRequest())
    assert drain(steps) == (0, None)
    node.ask(FoldRequest(Round(0), (member(first.pending),)))
    taken, trained = drain(steps)
    assert taken == STEPS - min(tau, STEPS)
    assert trained.pending.round == 1
    assert trained.overlapped == min(tau, STEPS)
    assert trained.held_s > 0
    assert trained.train_s > 0


@pytest.mark.parametrize("how", ["finalize", "adopt"])
def test_what_makes_the_round_final_lets_the_next_one_go_on(homes, how):
    spec = spec_of(overlap_steps=1)
    node, other = homes("a", spec), homes("b", spec, OTHER)
    theirs = member(other.train(0).pending, OTHER)
    node.train(0)
    steps = node.events(1, after=0)
    assert drain(steps) == (1, None)
    if how == "finalize":
        final = node.ask(FinalizeRequest(Round(0), (theirs,)))
    else:
        final = other.ask(FinalizeRequest(Round(0), (theirs,)))
        made = other.ask(SnapshotRequest(str(other.path / "snapshot")))
        node.ask(AdoptRequest(Round(0), made.path, final.state, ()))
    _, trained = drain(steps)
    assert trained.overlapped == 1
    assert trained.pending.base == final.state


def test_a_fold_that_came_before_costs_nothing(homes):
    node = homes("a", spec_of(overlap_steps=1))
    first = node.train(0)
    node.ask(FoldRequest(Round(0), (member(first.pending),)))
    *progress, trained = node.events(1, after=0)
    assert len(progress) == STEPS
    assert (trained.overlapped, trained.held_s) == (0, 0.0)


def test_a_round_that_is_given_up_while_it_waits_frees_the_worker(homes):
    node = homes("a", spec_of(overlap_steps=1))
    node.train(0)
    steps = node.events(1, after=0)
    assert drain(steps) == (1, None)
    steps.close()
    *progress, trained = node.events(3)
    assert len(progress) == STEPS
    assert trained.pending.round == 3


def test_without_overlap_a_round_begins_from_exactly_the_view(homes):
    spec = spec_of()
    node, other = homes("a", spec), homes("b", spec, OTHER)
    for number in range(3):
        mine, theirs = member(node.train(number).pending), member(other.train(number).pending, OTHER)
        for each in (node, other):
            each.ask(FoldRequest(Round(number), (mine, theirs)))
        expected = to_float(view(node))
        steps = node.events(number + 1)
        next(steps)
        assert torch.equal(anchor(node), expected)
        steps.close()
        tensors = node.saved().tensors
        assert not [name for name in tensors if name.startswith(("local/", "anchor"))]


@pytest.mark.parametrize(("fragments", "tau", "keep"), [(1, 2, 256), (1, 3, 128), (2, 0, 256), (2, 2, 200)])
def test_two_members_that_overlap_hold_one_view(homes, fragments, tau, keep):
    spec = spec_of(fragments, tau, keep)
    nodes = {ME: homes("a", spec), OTHER: homes("b", spec, OTHER)}
    before = {peer: node.train(0).pending for peer, node in nodes.items()}
    for number in range(1, 6):
        running = {}
        for peer, node in nodes.items():
            running[peer] = node.events(number, after=number - 1 if tau else -1)
            if tau:
                assert drain(running[peer]) == (tau, None)
        members = tuple(member(pending, peer) for peer, pending in before.items())
        if not tau:  # blocking: the fold is there before the next round begins
            running = {peer: node.events(number) for peer, node in nodes.items()}
        states = {
            node.ask(FoldRequest(Round(number - 1), members[:: 1 if peer == ME else -1])).state
            for peer, node in nodes.items()
        }
        assert len(states) == 1
        for peer, steps in running.items():
            before[peer] = drain(steps)[1].pending
            assert before[peer].base in states
            assert Path(before[peer].path).stat().st_size == payload_size(spec, number)
    for number in range(5):
        assert nodes[ME].session._fold.holds(number)


def test_overlapping_trains(homes):
    """The loss falls with three of four steps taken before the fold: merging does not undo what was learnt."""
    spec = spec_of(overlap_steps=3)
    node = homes("a", spec)
    before = node.train(0).pending
    start = node.ask(EvaluateRequest()).val_loss
    for number in range(1, 14):
        steps = node.events(number, after=number - 1)
        assert drain(steps) == (3, None)
        node.ask(FoldRequest(Round(number - 1), (member(before),)))
        before = drain(steps)[1].pending
    assert node.ask(EvaluateRequest()).val_loss < start - 0.1


@pytest.mark.parametrize("fragments", [1, 2])
def test_folds_in_any_order_end_in_one_view_and_one_set_of_local_weights(homes, fragments):
    spec = spec_of(fragments, 2, 128)
    author = homes("author", spec, OTHER)
    late = [member(author.train(number).pending, OTHER) for number in range(3)]
    ends = []
    for at, order in enumerate(permutations(range(3))):
        node = homes(f"n{at}", spec)
        mine = member(node.train(0).pending)
        steps = node.events(1, after=0)
        assert drain(steps) == (2, None)
        steps.close()
        for number in order:
            node.ask(FoldRequest(Round(number), (mine, late[0]) if number == 0 else (late[number],)))
            node.session._learner.weights.merge(view(node), arrived=number == 0)
        ends.append((view(node), local(node)))
    for other_view, other_local in ends[1:]:
        assert torch.equal(other_view, ends[0][0])
        assert torch.allclose(other_local, ends[0][1], atol=1e-6)


def test_a_round_of_a_fragment_touches_nothing_outside_its_cover(homes):
    spec = spec_of(fragments=2)
    node = homes("a", spec)
    node.ask(FoldRequest(Round(0), (member(node.train(0).pending),)))
    steps = node.events(1)
    next(steps)
    residual, weights = node.residual(), anchor(node)
    pending = drain(steps)[1].pending
    outside, inside = rows(spec, 1, outside=True), rows(spec, 1)
    assert torch.equal(node.residual()[outside], residual[outside])
    assert torch.equal(anchor(node)[outside], weights[outside])
    assert not torch.equal(node.residual()[inside], residual[inside])
    before = view(node).clone()
    node.ask(FoldRequest(Round(1), (member(pending),)))
    moved = view(node) != before
    assert moved[inside].any()
    assert not moved[outside].any()


def test_unsent_work_of_a_fragment_is_carried_until_its_round(homes):
    """What the first rounds trained in the other fragment is in the payload of its own round."""
    spec = spec_of(fragments=2)
    node = homes("a", spec)
    first = node.train(0).pending
    node.ask(FoldRequest(Round(0), (member(first),)))
    start = anchor(node)
    pending = node.train(1).pending
    inside = rows(spec, 1)
    total = (said(pending, start, spec) + node.residual())[inside]
    assert torch.allclose(total, (start - local(node))[inside], atol=1e-6)
    fresh = homes("b", spec)
    assert not torch.allclose(
        said(fresh.train(1).pending, start, spec)[inside], said(pending, start, spec)[inside]
    )


def test_a_fragment_that_missed_its_final_set_goes_back_to_its_own_rows(homes):
    spec = spec_of(fragments=2)
    node = homes("a", spec)
    kept, missed = node.train(0).pending, node.train(1).pending
    before, payload = node.residual(), said(missed, node.residual(), spec)
    assert not payload[rows(spec, 1, outside=True)].any()
    node.ask(FinalizeRequest(Round(0), (member(kept),)))
    node.ask(FinalizeRequest(Round(1), ()))
    assert torch.equal(node.residual(), before + payload)


def test_a_payload_is_legal_in_the_rounds_of_its_size_only(homes):
    spec = spec_of(fragments=2)
    node = homes("a", spec)
    pending = node.train(1).pending
    assert node.ask(VerifyRequest(pending.path, Round(3))) == VerifyReply()
    with pytest.raises(DecodeError):
        node.ask(VerifyRequest(pending.path, Round(0)))


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_kill_in_an_overlapped_round_loses_that_round_only(homes, fragments):
    spec = spec_of(fragments, 2, 128)
    steady, shaken = homes("steady", spec), homes("shaken", spec)
    ends = []
    for node in (steady, shaken):
        first = node.train(0).pending
        kept = local(node), anchor(node), node.residual()
        steps = node.events(1, after=0)
        assert drain(steps) == (2, None)
        if node is shaken:  # as after kill −9: nothing is said to the old session any more
            started = node.restart()
            assert started.pending == (first,)
            assert torch.equal(node.session._feedback.residual_C4096, kept[2])
            wanted = kept[:2] if fragments > 1 else (to_float(view(node)),) * 2  # all that it trained is sent
            assert all(torch.equal(*pair) for pair in zip((local(node), anchor(node)), wanted, strict=True))
            steps = node.events(1, after=0)
            assert drain(steps) == (2, None)
        node.ask(FoldRequest(Round(0), (member(first),)))
        ends.append((drain(steps)[1].pending, node))
    (one, steady), (two, shaken) = ends
    assert one.base == two.base
    if fragments > 1:  # else the steps before the fold began at another place
        assert one.payload == two.payload
        assert torch.equal(local(steady), local(shaken))
        assert torch.equal(steady.residual(), shaken.residual())


def test_a_restart_between_two_rounds_goes_on_as_if_there_had_been_none(homes):
    spec = spec_of(2, 2, 128)
    ends = []
    for name in ("steady", "shaken"):
        node, pendings = homes(name, spec), []
        for number in range(4):
            pendings.append(node.train(number).pending)
            if name == "shaken":
                assert node.restart().pending == tuple(pendings)
            for at in range(number + 1):
                node.ask(FoldRequest(Round(at), (member(pendings[at]),)))
        ends.append([pending.payload for pending in pendings])
    assert ends[0] == ends[1]


def test_weights_that_diverged_leave_everything_as_it_was(homes):
    node = homes("a", spec_of(fragments=2))
    node.train(0)
    steps = node.events(1)
    for _ in range(STEPS):
        next(steps)
    residual, weights = node.session._feedback.residual_C4096.clone(), anchor(node)
    spoilt = dict(node.session._learner.module.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    spoilt.data[-1, -1] = float("nan")
    with pytest.raises(Divergence) as fault:
        next(steps)
    assert "start again" in fault.value.line()
    assert "\n" not in fault.value.line()
    assert torch.equal(node.session._feedback.residual_C4096, residual)
    assert torch.equal(anchor(node), weights)


@pytest.mark.parametrize("name", ["residual", "anchor/values", "local/model.norm.weight"])
def test_a_saved_state_that_is_not_finite_gives_way_to_the_one_before(homes, name):
    node = homes("a", spec_of(fragments=2, overlap_steps=1))
    first = node.train(0).pending
    found = node.saved()
    bad = {key: value.clone() for key, value in found.tensors.items()}
    bad[name].view(-1)[-1] = float("inf")
    save(node, found.body, bad)
    assert node.restart().pending == (first,)
    save(node, found.body, bad)
    save(node, found.body, bad)
    with pytest.raises(CorruptFault, match=r"finite|infinity") as fault:
        node.restart()
    assert "\n" not in fault.value.line()


def test_a_state_without_local_weights_is_read_as_one_where_they_were_the_view(homes):
    node = homes("a", spec_of(overlap_steps=1))
    first = node.train(0).pending
    node.ask(FinalizeRequest(Round(0), (member(first),)))
    found = node.saved()
    old = {key: value for key, value in found.tensors.items() if not key.startswith(("local/", "anchor"))}
    save(node, found.body, old)
    assert node.restart().final == 0
    assert torch.equal(local(node), to_float(view(node)))
    *_, trained = node.events(1)
    assert trained.pending.round == 1


def save(node: Home, body: LocalBody, tensors: dict[str, torch.Tensor]) -> None:
    begin_local(node.path / "state", body, tensors).finish()
