"""A node with two devices, here two CPU processes: the steps of one, copies or parts, no life after the worker."""

import os
import shutil
import signal
from functools import cached_property
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.config.node_config import load_config
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DiskFault, LocalFault
from atoll.protocols.ids import Round
from atoll.protocols.local.worker_messages import (
    EvaluateRequest,
    FoldRequest,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.experts import ALL, bitmap_of
from atoll.protocols.run.model_spec import ExpertsSpec
from atoll.protocols.run.run_spec import RunSpec, Stage
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, member

E, STEPS = 4, 3
MIXTURE = ExpertsSpec(count=E, per_token=2, ffn=64, zero=2, computed=1.5, bias_rate=0.01, load_balance=0.5)
LOW, HIGH = bitmap_of({0, 1}, E), bitmap_of({1, 2}, E)


def spec_of(experts: ExpertsSpec | None, overlap_steps: int, batch: int) -> RunSpec:
    holders = 1 if experts else 0
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, STEPS),), overlap_steps=overlap_steps, holders=holders
    )
    return msgspec.structs.replace(
        SPEC,
        model=msgspec.structs.replace(SPEC.model, ffn=128 if experts else 64, experts=experts),
        outer=outer,
        # A gradient that is nearly zero must not decide by its rounding where a weight goes.
        inner=msgspec.structs.replace(SPEC.inner, batch=batch, eps=1e-4),
    )


class Node(Home):
    """A member whose rounds are folded without it, so that its weights move by merges too."""

    @cached_property
    def folded(self) -> dict[int, TrainReply]:
        return {}

    def again(self) -> None:
        """Restart, and fold again what is not final, as a daemon asks its worker to."""
        self.restart()
        for number, trained in self.folded.items():
            self.fold(number, trained)

    def round(self, number: int, experts: bytes, late: TrainReply | None = None) -> TrainReply:
        """`late`: of the round before, folded when this one cannot go on without it."""
        after, ahead = (-1 if late is None else number - 1), self.spec.outer.overlap_steps
        ask = TrainRequest(Round(number), 0, 1, STEPS, after, experts, ahead=ahead)
        for event in self.session.train(ask):
            if event is None:
                assert late is not None
                self.fold(number - 1, late)
        self.keep(number)
        assert isinstance(event, TrainReply)
        return event

    def fold(self, number: int, trained: TrainReply) -> None:
        """As if somebody else had made this payload."""
        copy = self.path / f"{number}.copy"
        if not copy.exists():
            shutil.copy(trained.pending.path, copy)
        named = msgspec.structs.replace(
            member(trained.pending, OTHER), experts=trained.pending.experts, path=str(copy)
        )
        self.ask(FoldRequest(Round(number), (named,)))
        self.folded[number] = trained

    def values(self) -> dict[str, torch.Tensor]:
        learner = self.session._learner
        return {
            name: v.detach().clone() for name, v in (learner.weights.trained() | learner.inner.state()).items()
        }

    def saved_values(self) -> dict[str, torch.Tensor]:
        residual_C4096 = self.session._feedback.residual_C4096.clone()
        return {name: v.clone() for name, v in self.session._learner.inner.state().items()} | {"e": residual_C4096}


def close(node: Node) -> None:
    children = node.session._ranks._children
    node.session.close()  # it ends their pipes, as its own end does
    assert [child.returncode for child in children] == [0] * len(children)


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.allclose(value, wanted[name], rtol=1e-4, atol=1e-5), name


def test_two_devices_take_the_steps_of_one_as_copies_or_parts_and_either_goes_on_from_the_other(
    tmp_path: Path,
) -> None:
    """A mixture: experts come and go, biases move, rounds overlap."""
    spec = spec_of(MIXTURE, STEPS, 4)
    one, two = Node(tmp_path / "one", ME, spec), Node(tmp_path / "two", ME, spec, "cpu,cpu")
    first = compare(0, LOW, one, two)
    second = compare(1, LOW, one, two, first)  # its fold comes after the last step
    fold(1, second, one, two)
    go_on(two, "cpu,cpu", shard=True)
    third = compare(2, LOW, one, two)
    fold(3, compare(3, HIGH, one, two, third), one, two)
    evaluated = [node.ask(EvaluateRequest()) for node in (one, two)]
    assert evaluated[0].state == evaluated[1].state, "one digest, however many devices a member has"
    assert evaluated[1].val_loss == pytest.approx(evaluated[0].val_loss, abs=1e-4)
    parts = [path.name for path in (two.path / "state").glob("*/parts/*")]
    assert len(parts) == 4, "a file of each process, in both generations"
    for node in (one, two):
        node.round(4, HIGH)
    _, write = two.session._learner.moments()
    with pytest.raises(DiskFault, match="Not a directory"):  # both say so, and go on
        write(Path("/dev/null/parts"))
    go_on(two, "cpu", shard=False)
    compare(5, HIGH, one, two)


SLOW = pytest.mark.slow(
    slice=(
        "test_devices_pass_their_sequences_one_by_one_with_layers_recomputed, "
        "test_two_devices_take_the_steps_of_one_as_copies_or_parts_and_either_goes_on_from_the_other"
    )
)


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=SLOW)], ids=["copies", "parts"])
def test_devices_pass_their_sequences_one_by_one_with_layers_recomputed(tmp_path: Path, shard: bool) -> None:
    """The first device has two of the five sequences, the second one three."""
    spec = spec_of(MIXTURE, 0, 5)
    one, two = Node(tmp_path / "one", ME, spec), Node(tmp_path / "two", ME, spec)
    two.session.close()
    two.start = msgspec.structs.replace(two.start, device="cpu,cpu", shard=shard, micro_batch=1, recompute=True)
    two.restart()
    fold(0, compare(0, LOW, one, two), one, two)
    compare(1, HIGH, one, two)
    close(two)


def test_two_devices_with_copies_take_muons_steps_and_parts_are_refused(tmp_path: Path) -> None:
    plain = spec_of(MIXTURE, 0, 4)
    spec = msgspec.structs.replace(plain, inner=msgspec.structs.replace(plain.inner, optimizer="muon"))
    one, two = Node(tmp_path / "one", ME, spec), Node(tmp_path / "two", ME, spec, "cpu,cpu")
    fold(0, compare(0, LOW, one, two), one, two)
    compare(1, HIGH, one, two)
    close(two)
    two.start = msgspec.structs.replace(two.start, shard=True)
    with pytest.raises(ConfigError, match=r"^shard cannot go with inner.optimizer muon"):
        two.again()


def go_on(node: Node, device: str, *, shard: bool) -> None:
    """Stop and start on other devices: every bit of the moments and the error feedback is as it was."""
    before = node.saved_values()
    close(node)
    node.start = msgspec.structs.replace(node.start, device=device, shard=shard)
    node.again()
    after = node.saved_values()
    assert after.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


def compare(number: int, experts: bytes, one: Node, two: Node, late: TrainReply | None = None) -> TrainReply:
    """A round of both, in which the processes of `two` compare their bits; the payload of `one`."""
    alone, together = one.round(number, experts, late), two.round(number, experts, late)
    assert together.pending.loss == pytest.approx(alone.pending.loss, abs=1e-5)
    assert together.pending.tokens == alone.pending.tokens
    assert together.overlapped == alone.overlapped == (STEPS if late else 0)
    assert_close(two.values(), one.values())
    return alone


def fold(number: int, trained: TrainReply, *nodes: Node) -> None:
    for node in nodes:
        node.fold(number, trained)


def test_a_device_that_goes_astray_is_found_and_one_that_dies_is_named(tmp_path: Path) -> None:
    spec = spec_of(None, 0, 3)  # a batch that is not even
    one, two = Node(tmp_path / "one", ME, spec), Node(tmp_path / "two", ME, spec, "cpu,cpu")
    fold(0, compare(0, ALL, one, two), one, two)
    saved = two.values()
    steps = two.session.train(TrainRequest(Round(1), 0, 1, STEPS, -1))
    next(steps)
    two.session._learner.module.model.norm.weight.data[0] += 1e-6  # memory that is not as it was
    with pytest.raises(LocalFault, match="do not hold the same weights"):
        list(steps)
    steps = two.session.train(TrainRequest(Round(1), 0, 1, STEPS, -1))
    next(steps)
    (child,) = two.session._ranks._children
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError):
        list(steps)
    assert two.lost == ["local rank 1 of 2 ended with signal 9, and the worker with it"]
    two.session._ranks.close()
    two.start = msgspec.structs.replace(two.start, device="cpu")
    two.again()
    assert_close(two.values() | _weights(saved), saved)
    compare(1, ALL, one, two)


def _weights(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those that begin every round as the view, and are not saved."""
    return {name: value for name, value in values.items() if "/" not in name}


def test_devices_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^cuda:0 is not here: torch sees no CUDA device$"):
        Home(tmp_path / "a", ME, spec_of(None, 0, 2), "cuda:0,cuda:1")
    with pytest.raises(ConfigError, match=r"^cuda:7 is not here"):
        Home(tmp_path / "b", device="cuda:7")
    start = StartRequest(codec.encode(spec_of(MIXTURE, 0, 4)), ME, str(tmp_path), "", 1, "cpu,cpu,cpu", shard=True)
    with pytest.raises(ConfigError, match="cannot be cut into 3"):
        Session(start)
    with pytest.raises(ConfigError, match=r"^3 devices cannot share steps of 2 sequences$"):
        Home(tmp_path / "c", ME, spec_of(None, 0, 2), "cpu,cpu,cpu")


@pytest.mark.parametrize(
    "text",
    ["cpu,cuda:0", "cuda,cuda:1", "cuda:0,cuda:0", "cuda:0,cuda:00", "auto,auto", "cuda:0,", "cpu,cpu" * 40],
)
def test_lists_that_no_machine_can_have_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        load_config(tmp_path / "config.toml", {"device": text})


def test_parts_of_one_device_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shard is for several devices"):
        load_config(tmp_path / "config.toml", {"device": "cpu", "shard": True})
