"""Slices in a real session: the bits of whole payloads, a chain that survives restarts, and what goes back."""

import os
import select
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.ipc.framing import Inbox, ReplyWriter, frame, read_frame
from atoll.node.worker.folding.reduction_work import OPENABLE
from atoll.node.worker.loop import Worker
from atoll.node.worker.round_trainer import RoundTrainer
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.errors import CorruptFault, DecodeError, LocalFault
from atoll.protocols.ids import Digest, Round
from atoll.protocols.ledger.reduction import RowsAnswer
from atoll.protocols.ledger.rows import RowTree
from atoll.protocols.local.worker_messages import (
    CheckReply,
    CheckRequest,
    FinalizeRequest,
    FoldRequest,
    JudgeRequest,
    Member,
    OpenRequest,
    Pending,
    Published,
    ReduceReply,
    ReduceRequest,
    ReplyEnvelope,
    RequestEnvelope,
    Slice,
    VerifyRequest,
)
from atoll.protocols.run.arena import Span, arena_of
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.slices import ReduceSpec
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, K, member, said
from tests.waiting import HANGS_S

torch.set_num_threads(1)
REDUCED = msgspec.structs.replace(SPEC, reduce=ReduceSpec(above=1, k=K // 2))
CHUNKS = arena_of(SPEC.model).chunks
ANSWER_S = 20.0
"""Most seconds for an opening, which takes milliseconds: the step before it never ends by itself."""
HALVES = (Span(0, 5), Span(5, CHUNKS))


class Pair:
    """Two members of a run whose rounds may be reduced, and the rows that they give each other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mine, self.other = Home(root / "me", ME, REDUCED), Home(root / "other", OTHER, REDUCED)
        self.members: tuple[Member, ...] = ()
        self.roots: tuple[Digest, ...] = ()

    def train(self, number: int) -> tuple[Pending, Pending]:
        pendings = self.mine.train(number).pending, self.other.train(number).pending
        both = [(member(p, author), Digest(p.form)) for p, author in zip(pendings, (ME, OTHER), strict=True)]
        both.sort(key=lambda one: one[0].entry)
        self.members, self.roots = (tuple(one) for one in zip(*both, strict=True))
        return pendings

    def raw(self, span: Span) -> tuple[Member, ...]:
        return tuple(self._rows(one, span) for one in self.members)

    def _rows(self, whole: Member, span: Span) -> Member:
        tree = RowTree(Path(whole.path).read_bytes(), Layout("sparse2", CHUNKS, K))
        path = self.root / f"{whole.entry.hex()}-{span.start}"
        path.write_bytes(codec.encode(RowsAnswer(*tree.part(span))))
        return msgspec.structs.replace(whole, path=str(path))

    def ask(self, number: int, previous: int = -1, span: Span = HALVES[0]) -> ReduceRequest:
        return ReduceRequest(Round(number), span, self.raw(span), self.roots, previous)

    def reduce(self, number: int, previous: int = -1, span: Span = HALVES[0]) -> ReduceReply:
        done = self.mine.ask(self.ask(number, previous, span))
        assert isinstance(done, ReduceReply)
        blob = self.root / done.payload.hex()
        shutil.copy(done.path, blob)
        return msgspec.structs.replace(done, path=str(blob))

    def slices(self, done: ReduceReply | None) -> tuple[Slice, ...]:
        first = Slice(HALVES[0], (), self.raw(HALVES[0]), True)
        if done is not None:
            weight = sum(one.weight for one in self.members)
            first = Slice(HALVES[0], (Member(done.kept, ME, weight, done.payload, done.path),), (), True)
        return first, Slice(HALVES[1], (), self.raw(HALVES[1]), True)


@contextmanager
def served(session: Session, until: threading.Event) -> Iterator[tuple[int, int]]:
    """A worker with this session over pipes: where requests are written, and where its replies come.

    At the end the event is set, so that a step that waits for it goes on, and the pipe of requests closed.
    """
    (asks, daemon), (answers, back) = os.pipe(), os.pipe()
    worker = Worker(Inbox(asks), ReplyWriter(back))
    worker._session = session
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield daemon, answers
    finally:
        until.set()
        os.close(daemon)
        thread.join(HANGS_S)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_a_set_without_reductions_gives_the_same_bits_in_slices_as_whole(pair):
    pair.train(0)
    whole = pair.mine.ask(FoldRequest(Round(0), pair.members))
    sliced = pair.other.ask(FoldRequest(Round(0), (), pair.slices(None)))
    assert whole.state == sliced.state
    assert pair.mine.ask(CheckRequest(Round(0), (), pair.slices(None))) == CheckReply(Round(0), whole.state)


def test_a_reduced_slice_counts_the_same_everywhere_and_the_rest_is_owed(pair):
    pair.train(0)
    done = pair.reduce(0)
    pair.mine.ask(VerifyRequest(done.path, Round(0), rows=done.rows, reduced=(HALVES[0],)))
    for rows, span in ((done.kept, HALVES[0]), (done.rows, HALVES[1])):
        with pytest.raises(DecodeError):
            pair.mine.ask(VerifyRequest(done.path, Round(0), rows=rows, reduced=(span,)))
    states = {home.ask(FoldRequest(Round(0), (), pair.slices(done))).state for home in (pair.mine, pair.other)}
    assert len(states) == 1
    raw = pair.mine.ask(CheckRequest(Round(0), (), pair.slices(None)))
    assert raw.state not in states, "the second compression leaves something out"
    assert pair.reduce(0) == done, "asked again it is the same"


def test_the_chain_goes_on_after_a_restart_and_anew_after_a_loss(pair, tmp_path):
    pair.train(0)
    first = pair.reduce(0)
    assert list((tmp_path / "me").rglob("*.reduced"))
    pair.mine.restart()
    assert not list((tmp_path / "me").rglob("*.reduced")), "the blob store has it"
    pair.mine.ask(FoldRequest(Round(0), (), pair.slices(first)))
    pair.other.ask(FoldRequest(Round(0), (), pair.slices(first)))
    pair.train(1)
    assert pair.reduce(1, previous=0).previous == 0
    pair.mine.restart()
    pair.train(2)
    assert pair.reduce(2, previous=5).previous == -1, "another one was published than the one that is saved"


@pytest.mark.parametrize("restarts", [(), (1,), (2,), (1, 2)])
def test_the_chain_outlives_rounds_that_are_reduced_by_others(pair, restarts):
    """What was kept of a Reduction that counts is owed until the next one says it."""
    for number in (0, 1):
        pair.train(number)
        slices = pair.slices(pair.reduce(0) if number == 0 else None)
        for home in (pair.mine, pair.other):
            home.ask(FinalizeRequest(Round(number), (), slices))
        if number + 1 in restarts:
            pair.mine.restart()
    pair.train(2)
    assert pair.reduce(2, previous=0).previous == 0


def test_an_opening_is_given_and_a_proof_of_something_else_refused(pair, tmp_path):
    pair.train(0)
    pair.reduce(0)
    assert pair.mine.ask(OpenRequest(Round(0), 3)).opening
    (tmp_path / "proof").write_bytes(b"\x90")
    with pytest.raises(DecodeError):
        pair.mine.ask(JudgeRequest(str(tmp_path / "proof"), Digest(bytes(32))))


def published(pair: Pair, asks: list[tuple[ReduceRequest, ReduceReply]]) -> tuple[Published, ...]:
    """What the daemon knows of our Reductions, of which each continues the one before; the newest first."""
    began = [b"", *(done.kept for _, done in asks)]
    return tuple(
        Published(ask, done.path, done.kept, before) for (ask, done), before in zip(asks, began, strict=False)
    )[::-1]


@pytest.mark.parametrize("final", [False, True], ids=["open", "missed"])
def test_a_worker_of_the_next_life_opens_what_the_one_before_reduced(pair, final):
    """Each by what remained after it; also once their rounds became final without them."""
    made = []
    for number in range(2):
        pair.train(number)
        made.append((pair.ask(number, number - 1), pair.reduce(number, number - 1)))
        pair.mine.ask(FoldRequest(Round(number), (), pair.slices(made[-1][1])))
    openings = [pair.mine.ask(OpenRequest(Round(number), 3)) for number in range(2)]
    pair.mine.restart()
    with pytest.raises(LocalFault):
        pair.mine.ask(OpenRequest(Round(0), 3))
    for number in range(2) if final else ():
        pair.mine.ask(FinalizeRequest(Round(number), (), pair.slices(None)))
    again = published(pair, made)
    assert pair.mine.ask(OpenRequest(Round(1), 3, again)) == openings[1]
    assert pair.mine.ask(OpenRequest(Round(0), 3, again)) == openings[0]
    assert pair.mine.ask(OpenRequest(Round(0), 3)) == openings[0], "it is made again once"


def test_a_worker_of_a_later_life_opens_what_was_reduced_when_the_slice_had_moved(pair):
    """What remains does not show what the chunks held that are another's now: it is saved with it."""
    pair.train(0)
    first = (pair.ask(0), pair.reduce(0))
    pair.mine.ask(FinalizeRequest(Round(0), (), pair.slices(first[1])))
    pair.other.ask(FinalizeRequest(Round(0), (), pair.slices(first[1])))
    pair.train(1)
    moved = Span(2, 7)
    second = (pair.ask(1, 0, moved), pair.reduce(1, 0, moved))
    opening = pair.mine.ask(OpenRequest(Round(1), 3))
    for _ in range(2):
        pair.mine.restart()
    assert pair.mine.ask(OpenRequest(Round(1), 3, published(pair, [first, second])[:1])) == opening


@pytest.mark.parametrize("wrong", ["kept", "began", "path", "rows"])
def test_what_cannot_be_made_again_exactly_is_not_opened(pair, wrong):
    """The opening of something else than was published is a fault of this node."""
    made = []
    for number in range(2):
        pair.train(number)
        made.append((pair.ask(number, number - 1), pair.reduce(number, number - 1)))
        pair.mine.ask(FoldRequest(Round(number), (), pair.slices(made[-1][1])))
    pair.mine.restart()
    newest, first = published(pair, made)
    change = {
        "kept": {"kept": newest.began},
        "began": {"began": newest.kept},
        "path": {"path": first.path},
        "rows": {"ask": msgspec.structs.replace(first.ask, round=Round(1), previous=0)},
    }[wrong]
    with pytest.raises(LocalFault):
        pair.mine.ask(OpenRequest(Round(1), 3, (msgspec.structs.replace(newest, **change),)))


def test_a_reduction_that_missed_its_set_is_opened_for_some_rounds_and_one_that_counts_is_not(pair):
    opened = []
    for number in range(OPENABLE + 3):
        pair.train(number)
        done = pair.reduce(number)
        is_named = number != 1
        for home in (pair.mine, pair.other):
            home.ask(FinalizeRequest(Round(number), (), pair.slices(done if is_named else None)))
        for at in (number, 1):
            try:
                opened.append((number, at, bool(pair.mine.ask(OpenRequest(Round(at), 3)).opening)))
            except LocalFault:
                continue
    assert {(number, at) for number, at, _ in opened} == {(number, 1) for number in range(1, OPENABLE + 1)}


def test_an_opening_does_not_wait_for_the_end_of_a_step(pair, monkeypatch):
    """A step of a slow member takes longer than the patience of those that audit it."""
    pair.train(0)
    pair.reduce(0)
    begun, may_end, step = threading.Event(), threading.Event(), RoundTrainer._step

    def long_step(self, *args) -> float:
        begun.set()
        assert may_end.wait(HANGS_S)
        return step(self, *args)

    monkeypatch.setattr(RoundTrainer, "_step", long_step)
    with served(pair.mine.session, until=may_end) as (daemon, answers):
        os.write(daemon, frame(RequestEnvelope(1, pair.mine.train_ask(1))))
        assert begun.wait(HANGS_S)
        os.write(daemon, frame(RequestEnvelope(2, OpenRequest(Round(0), 3))))
        assert select.select([answers], [], [], ANSWER_S)[0], "no answer while the step goes on"
        first = read_frame(answers, ReplyEnvelope)
        assert not may_end.is_set()
        assert (first.id, first.answer) == (2, pair.mine.ask(OpenRequest(Round(0), 3)))


def test_the_account_of_time_that_comes_with_an_opening_is_no_older_than_the_one_before(pair, monkeypatch):
    """Counted steps would be taken back, and counted again with the next reply."""
    pair.train(0)
    pair.reduce(0)
    may_go_on, steps, step = threading.Event(), list[float](), RoundTrainer._step

    def second_step_is_long(self, *args) -> float:
        if steps:
            assert may_go_on.wait(HANGS_S)
        steps.append(step(self, *args))
        return steps[-1]

    monkeypatch.setattr(RoundTrainer, "_step", second_step_is_long)
    with served(pair.mine.session, until=may_go_on) as (daemon, answers):
        os.write(daemon, frame(RequestEnvelope(1, pair.mine.train_ask(1))))
        progress = read_frame(answers, ReplyEnvelope)
        os.write(daemon, frame(RequestEnvelope(2, OpenRequest(Round(0), 3))))
        opened = read_frame(answers, ReplyEnvelope)
        assert (progress.id, opened.id) == (1, 2)
        assert opened.spent.steps_ns >= progress.spent.steps_ns > 0


def test_what_does_not_count_in_a_slice_goes_back_there(pair):
    pending, _ = pair.train(0)
    before = pair.mine.residual().clone()
    whole = said(pending, before, REDUCED)
    first, second = pair.slices(None)
    without = tuple(one for one in second.raw if one.author != ME)
    pair.mine.ask(FinalizeRequest(Round(0), (), (first, Slice(second.span, (), without, False))))
    back = pair.mine.residual() - before
    assert torch.equal(back[HALVES[0].start : HALVES[0].stop], torch.zeros_like(back[:5]))
    assert torch.allclose(back[HALVES[1].start :], whole[HALVES[1].start :], atol=1e-6)


def test_a_reduction_that_missed_its_set_is_not_owed_twice(pair):
    pair.train(0)
    before = pair.mine.residual().clone()
    pair.reduce(0)
    pair.mine.ask(FinalizeRequest(Round(0), (), pair.slices(None)))
    assert torch.equal(pair.mine.residual(), before), "it was added raw, and nothing was kept before"
    pair.train(1)
    assert pair.reduce(1, previous=0).previous == -1


def test_rows_that_are_gone_are_a_corrupt_fault(pair):
    pair.train(0)
    slices = pair.slices(None)
    Path(slices[0].raw[0].path).unlink()
    with pytest.raises(CorruptFault):
        pair.mine.ask(FoldRequest(Round(0), (), slices))
