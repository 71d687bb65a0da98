"""One node's disk with a worker's session on it, for the tests of what it does and of what it keeps."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from atoll.node.checkpoint.local import LocalState, load_local
from atoll.node.ipc.time_budget import TimeBudget
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.worker.local_weights import LocalWeights
from atoll.node.worker.session import Event, Session
from atoll.protocols import codec
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Round, digest
from atoll.protocols.ledger.coverage import cover_of, size_of, slabs
from atoll.protocols.local.worker_messages import (
    Answer,
    Ask,
    Member,
    Pending,
    SaveRequest,
    StartReply,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import (
    SPEC_VERSION,
    CompressSpec,
    DataSpec,
    InnerSpec,
    OuterSpec,
    PaceSpec,
    RunSpec,
    Stage,
)

ME, OTHER = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))
K = 64
SPEC = RunSpec(
    version=SPEC_VERSION, name="session", owner=ME, seed=1,
    model=ModelSpec(
        dim=64, layers=1, heads=2, kv_heads=1, ffn=64, vocab=256, context=16,
        tied=True, rope_theta=1e4, norm_eps=1e-5,
    ),
    data=DataSpec(source="synthetic:markov?size=65536", tokenizer="bytes", digest=b""),
    inner=InnerSpec(
        lr=1e-2, lr_min=0.1, warmup_steps=1, total_steps=100, beta1=0.9, beta2=0.95, eps=1e-8,
        weight_decay=0.0, clip=1.0, batch=2,
    ),
    outer=OuterSpec(rounds=50, stages=(Stage(0, 2),), alpha_256=256, floor_256=0),
    compress=CompressSpec(codec="sparse2", k=K, feedback=0.95),
    pace=PaceSpec(quorum_256=128, grace_256=256, lease_s=20.0, min_members=1),
)  # fmt: skip
OVERLAPPING = msgspec.structs.replace(SPEC, outer=msgspec.structs.replace(SPEC.outer, overlap_steps=1))


class Home:
    """One node's disk, and the session on it."""

    def __init__(
        self, path: Path, peer: str = ME, spec: RunSpec = SPEC, device: str = "cpu", exchange_on: str = "auto",
        **more: bool,
    ) -> None:  # fmt: skip
        """`more`: of StartRequest."""
        self.path, self.spec = path, spec
        self.start = StartRequest(
            codec.encode(spec), peer, str(path), "", 1, device, exchange_on=exchange_on, **more
        )
        self.lost: list[str] = []
        """What was said of the processes of other devices."""
        self.restart()

    def restart(self) -> StartReply:
        self.session = Session(self.start, saves=TimeBudget(math.inf), lost=self.lost.append)
        return self.session.started()

    def train_ask(self, number: int, after: int = -1) -> TrainRequest:
        slot, slots = (0, 1) if self.start.peer == ME else (1, 2)
        ahead = self.spec.outer.overlap_steps
        return TrainRequest(Round(number), slot, slots, self.spec.steps(number), after, ahead=ahead)

    def train(self, number: int) -> TrainReply:
        *progress, trained = self.events(number)
        assert isinstance(trained, TrainReply)
        self.steps = len(progress)
        return trained

    def events(self, number: int, after: int = -1) -> Iterator[Event]:
        """Of a round; its result when it is safe."""
        for event in self.session.train(self.train_ask(number, after)):
            if isinstance(event, TrainReply):
                self.keep(number)
            yield event

    def keep(self, number: int) -> None:
        """Until the round is safe."""
        while self.session.finish_save(SaveRequest(Round(number))) is None:
            time.sleep(0.001)

    def ask(self, ask: Ask) -> Answer:
        return self.session.answer(ask)

    def saved(self) -> LocalState:
        """The newest generation."""
        found = load_local(self.path / "state", self.spec.id)
        assert found is not None
        return found

    def residual(self) -> torch.Tensor:
        """As it is on disk."""
        return self.saved().tensors["residual"]


def member(pending: Pending, author: str = ME) -> Member:
    return Member(digest(author.encode(), pending.payload), author, pending.weight, pending.payload, pending.path)


def said(pending: Pending, like: torch.Tensor, spec: RunSpec = SPEC) -> torch.Tensor:
    """The values of a payload."""
    value, cover = torch.zeros_like(like), cover_of(spec, pending.round)
    part = torch.zeros((size_of(cover), like.shape[1]))
    codec_of("sparse2", K).give_back(part, Path(pending.path).read_bytes())
    for at, span in slabs(cover, 64):
        value[span.start : span.stop] = part[at : at + span.stop - span.start]
    return value


def given(number: int, weights: LocalWeights, like: torch.Tensor, spec: RunSpec) -> torch.Tensor:
    """The pseudo-gradient that a round gives: of the rows that it covers, in an arena like `like`."""
    delta = torch.zeros_like(like)
    for span in cover_of(spec, number):
        rows = slice(span.start, span.stop)
        delta[rows] = weights.anchor_C4096[rows] - weights.rows(span)
    return delta


def blocked(path: Path) -> Callable[[], None]:
    """Put a file where a folder must be; returns what takes it away again. Even root cannot write below it."""
    aside = path.with_name(path.name + ".aside")
    if path.exists():
        path.rename(aside)
    path.write_bytes(b"")

    def mend() -> None:
        path.unlink()
        if aside.exists():
            aside.rename(path)

    return mend
