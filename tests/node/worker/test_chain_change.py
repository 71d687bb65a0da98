"""A node leaves its chain: what it encoded is in the winner's sets, pending, or in its error feedback, once.

The law is exact but for rounding: the error feedback is what it would be if all that does not count had never been
sent, or, of what only the chain that was left counted, if all but a share of it had been sent.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint import generations
from atoll.node.ipc import chain_mark
from atoll.node.ipc.chain_mark import ASIDE, ChainMark
from atoll.node.runs.capacity import open_rounds
from atoll.node.worker import error_feedback
from atoll.node.worker.local_weights import LocalWeights
from atoll.protocols.errors import CorruptFault, DiskFault
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import cover_of, size_of
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    Counted,
    FinalizeRequest,
    FoldRequest,
    Member,
    Pending,
    SnapshotRequest,
)
from atoll.protocols.run.arena import Span
from atoll.protocols.run.run_spec import RunSpec, Stage
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, given, member, said

FORK = 2
"""First round that the two sides decide apart."""
SPECS = {
    "plain": (1, 0, 0.95),
    "fragments": (2, 0, 0.9),
    "overlap": (1, 1, 0.95),
    "no decay": (1, 0, 1.0),
    "no feedback": (1, 0, 0.0),
}


def spec_of(name: str) -> RunSpec:
    fragments, overlap_steps, feedback = SPECS[name]
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, 2),), fragments=fragments, overlap_steps=overlap_steps
    )
    compress = msgspec.structs.replace(SPEC.compress, feedback=feedback)
    return msgspec.structs.replace(SPEC, outer=outer, compress=compress)


class Side:
    """A node with what its rounds gave, measured from outside, and what they sent."""

    def __init__(self, path: Path, peer: str, spec: RunSpec) -> None:
        self.home, self.spec, self.peer = Home(path, peer, spec), spec, peer
        self.blobs = path / "blobs"
        self.given: dict[int, torch.Tensor] = {}
        self.sent: dict[int, torch.Tensor] = {}
        self.work: dict[int, Pending] = {}

    def train(self, number: int) -> None:
        feedback = self.home.session._feedback
        encode = feedback.encode

        def listen(at: int, weights: LocalWeights) -> bytearray:
            self.given[at] = given(at, weights, feedback.residual_C4096, self.spec)
            return encode(at, weights)

        feedback.encode = listen
        try:
            self.work[number] = self.home.train(number).pending
        finally:
            feedback.encode = encode
        self.sent[number] = said(self.work[number], self.given[number], self.spec)
        self.blobs.mkdir(exist_ok=True)
        shutil.copy(self.work[number].path, self._blob(number))

    def _blob(self, number: int) -> Path:
        return self.blobs / str(number)

    def member(self, number: int) -> Member:
        """As others hold it."""
        return member(msgspec.structs.replace(self.work[number], path=str(self._blob(number))), self.peer)

    def final(self, number: int, *authors: "Side") -> None:
        """A round with the work of these is final here."""
        members = tuple(side.member(number) for side in authors)
        self.home.ask(FoldRequest(Round(number), members))
        self.home.ask(FinalizeRequest(Round(number), members))

    def leave(self, first: int) -> None:
        """The daemon says so and ends; the next one starts a worker."""
        self.home.session.close()
        ChainMark(self.home.path).put(first)
        self.home.restart()

    def adopt(self, number: int, other: "Side", counted: dict[int, tuple[Span, ...]]) -> None:
        """A snapshot of the other side, whose sets hold these rows of ours."""
        made = other.home.ask(SnapshotRequest(str(other.home.path / "snapshot")))
        included = tuple(Counted(self.work[at].payload, spans, Round(at)) for at, spans in counted.items())
        self.home.ask(AdoptRequest(Round(number), made.path, made.state, included))

    def whole(self, number: int) -> tuple[Span, ...]:
        return (Span(0, size_of(cover_of(self.spec, number))),)

    def owed(
        self, counted: set[int], rows: dict[int, torch.Tensor] | None = None, left: tuple[int, ...] = ()
    ) -> torch.Tensor:
        """What the error feedback holds if these rounds, or rows, count, and nothing else was ever sent.

        `left`: rounds that counted in a chain that was left.
        """
        share = error_feedback.share_of_left(self.spec.compress.feedback)
        rest = torch.zeros_like(next(iter(self.given.values())))
        for number in sorted(self.given):
            for span in cover_of(self.spec, number):
                rest[span.start : span.stop] *= self.spec.compress.feedback
            rest += self.given[number]
            there = torch.zeros_like(rest) if number not in counted else self.sent[number]
            if rows is not None and number in rows:
                there = rows[number]
            rest -= there
            if number in left:
                rest -= (1 - share) * (self.sent[number] - there)
        return rest

    def check(
        self, counted: set[int], rows: dict[int, torch.Tensor] | None = None, left: tuple[int, ...] = ()
    ) -> None:
        found = self.home.session._feedback.residual_C4096
        assert torch.allclose(found, self.owed(counted, rows, left), atol=2e-6)
        assert found.abs().max() > 1e-3 or not self.spec.compress.feedback


@pytest.fixture(params=SPECS)
def sides(request, tmp_path) -> tuple[Side, Side]:
    """Two sides that had rounds 0 and 1 in common. Ours went on to round 5 and sent round 6."""
    return parted(tmp_path, spec_of(request.param))


def parted(folder: Path, spec: RunSpec) -> tuple[Side, Side]:
    torch.set_num_threads(1)
    ours, theirs = Side(folder / "ours", ME, spec), Side(folder / "theirs", OTHER, spec)
    for number in range(FORK):
        for side in (ours, theirs):
            side.train(number)
        for side in (ours, theirs):
            side.final(number, ours, theirs)
    for number in range(FORK, 7):
        ours.train(number)
        if number < 6:
            ours.final(number, *([] if number == 3 else [ours]))  # round 3 went back to the error feedback
    ours.check({0, 1, 2, 4, 5, 6})
    for number in range(FORK, 7):
        theirs.train(number)
    for number in range(FORK, 5):
        theirs.final(number, *([ours, theirs] if number == 3 else [theirs]))  # and here it counts
    return ours, theirs


def test_all_that_was_encoded_counts_with_the_winner_or_is_in_the_error_feedback(sides):
    ours, theirs = sides
    ours.leave(FORK)
    started = ours.home.session.started()
    assert (started.final, started.settled) == (-1, FORK - 1)
    assert [pending.round for pending in started.pending] == [2, 3, 4, 5, 6]
    assert (ours.home.path / ASIDE).is_dir(), "the model of the other side is kept"
    ours.check({0, 1, 2, 3, 4, 5, 6})
    ours.adopt(4, theirs, {0: ours.whole(0), 1: ours.whole(1), 3: ours.whole(3)})
    ours.check({0, 1, 3, 5, 6}, left=(2, 4))
    ours.home.restart()
    ours.check({0, 1, 3, 5, 6}, left=(2, 4))
    for side in (ours, theirs):
        side.final(5, theirs)
    ours.train(7)
    for side in (ours, theirs):
        side.final(6, ours, theirs)
    ours.check({0, 1, 3, 6, 7}, left=(2, 4, 5))
    assert ours.home.session._fold.state_digest() == theirs.home.session._fold.state_digest()


def test_a_node_that_goes_back_to_its_first_chain_takes_out_what_counts_there(sides):
    ours, theirs = sides
    back = ours.home.session._fold.final_round, ours.home.ask(SnapshotRequest(str(ours.home.path / "first")))
    ours.leave(FORK)
    ours.adopt(4, theirs, {0: ours.whole(0), 1: ours.whole(1), 3: ours.whole(3)})
    ours.leave(FORK)
    ours.check({0, 1, 2, 3, 4, 5, 6})
    included = tuple(Counted(ours.work[at].payload, ours.whole(at), Round(at)) for at in (0, 1, 2, 4, 5))
    ours.home.ask(AdoptRequest(Round(back[0]), back[1].path, back[1].state, included))
    ours.check({0, 1, 2, 4, 5, 6}, left=(3,))


def test_a_payload_of_which_nothing_is_left_is_not_decoded(sides, monkeypatch):
    ours, _ = sides
    feedback = ours.home.session._feedback
    held = feedback.residual_C4096.clone()
    monkeypatch.setattr(error_feedback, "NO_SHARE", 1.1)
    monkeypatch.setattr(feedback, "_codec_of", lambda number: pytest.fail("it is decoded"))
    feedback.reopen(0)
    assert feedback.pending
    assert torch.equal(feedback.residual_C4096, held)


def test_rows_count_one_by_one(tmp_path):
    ours, theirs = parted(tmp_path, spec_of("plain"))
    ours.leave(FORK)
    part = (Span(1, 3),)
    ours.adopt(4, theirs, {0: ours.whole(0), 1: ours.whole(1), 2: part, 3: ours.whole(3)})
    rows = torch.zeros_like(ours.sent[2])
    rows[1:3] = ours.sent[2][1:3]
    ours.check({0, 1, 2, 3, 5, 6}, {2: rows}, left=(2, 4))
    ours.leave(FORK)
    ours.check({0, 1, 2, 3, 4, 5, 6})


def test_a_state_of_the_common_past_stays_whole(tmp_path):
    ours, _ = parted(tmp_path, spec_of("plain"))
    state = ours.home.session._fold.state_digest()
    ours.leave(6)
    assert (ours.home.session._fold.final_round, ours.home.session._fold.state_digest()) == (5, state)
    assert not (ours.home.path / ASIDE).exists()
    assert ChainMark(ours.home.path).first() is None


def test_a_payload_that_is_gone_is_left_out_and_nothing_else(tmp_path):
    ours, theirs = parted(tmp_path, spec_of("plain"))
    Path(ours.work[4].path).unlink()
    ours.leave(FORK)
    assert [pending.round for pending in ours.home.session.started().pending] == [2, 3, 5, 6]
    ours.adopt(4, theirs, {0: ours.whole(0), 1: ours.whole(1), 3: ours.whole(3)})
    ours.check({0, 1, 3, 4, 5, 6}, left=(2,))


def test_error_feedback_is_not_dropped_for_work_that_the_node_knows_of(tmp_path):
    """The newest payload is gone, and counts with the winner: no newer state than this one sent it."""
    ours, theirs = parted(tmp_path, spec_of("plain"))
    for number, authors in ((5, (theirs,)), (6, (ours, theirs))):
        theirs.final(number, *authors)
    Path(ours.work[6].path).unlink()
    ours.leave(FORK)
    ours.home.restart()
    ours.adopt(6, theirs, {at: ours.whole(at) for at in (0, 1, 3, 6)})
    ours.check({0, 1, 3, 6}, left=(2, 4, 5))


def test_no_more_payloads_are_kept_than_the_error_feedback_is_large(tmp_path, monkeypatch):
    monkeypatch.setattr(open_rounds, "PAST_PAYLOADS", 2)
    ours, theirs = parted(tmp_path, spec_of("plain"))
    assert len(list((ours.home.path / "spool").glob("*.payload"))) == 3, "two of final rounds, one that is pending"
    ours.leave(FORK)
    assert [pending.round for pending in ours.home.session.started().pending] == [4, 5, 6]
    ours.adopt(4, theirs, {})
    ours.check({0, 1, 2, 5, 6}, left=(4,))


class Killed(BaseException):
    """Nothing in the worker runs any more."""


def dies(what: Callable[..., object], when: str) -> Callable[..., object]:
    def work(*args: object, **named: object) -> object:
        if when == "after":
            what(*args, **named)
        elif args and isinstance(args[0], generations.Unfinished):
            args[0]._close()  # as the end of a process does
        raise Killed

    return work


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("place", "name"),
    [
        (generations.Unfinished, "finish"),
        (generations, "move_older"),
        (generations, "remove_tree"),
        (ChainMark, "remove"),
    ],
)
def test_a_kill_at_any_durable_step_is_repeated_without_a_trace(tmp_path, monkeypatch, place, name, when):
    ours, theirs = parted(tmp_path, spec_of("plain"))
    (ours.home.path / ASIDE).mkdir()
    ours.home.session.close()  # which saves the moments: nothing of it is left to do in `leave`
    for _ in range(random.Random(f"{name} {when}").randint(1, 2)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, dies(getattr(place, name), when))
            with pytest.raises(Killed):
                ours.leave(FORK) if ChainMark(ours.home.path).first() is None else ours.home.restart()
    ours.home.restart()
    assert ChainMark(ours.home.path).first() is None
    assert len(list((ours.home.path / ASIDE).iterdir())) == 1
    ours.check({0, 1, 2, 3, 4, 5, 6})
    ours.adopt(4, theirs, {0: ours.whole(0), 1: ours.whole(1), 3: ours.whole(3)})
    ours.check({0, 1, 3, 5, 6}, left=(2, 4))


def test_payloads_that_return_are_not_in_memory_together(tmp_path):
    """There may be 128 of them, and no size that was planned for the worker counts them."""
    ours, _ = parted(tmp_path, spec_of("plain"))
    ours.leave(FORK)
    feedback = ours.home.session._feedback
    missed = feedback.missed(6, {}, {})
    assert [len(one.data) for one in missed] == [Path(one.path).stat().st_size for one in feedback.pending]
    assert {type(one.data) for one in missed} == {memoryview}, (
        "they are mapped: the system may take the pages back"
    )


def test_a_disk_that_refuses_is_tried_again(tmp_path, monkeypatch):
    ours, _ = parted(tmp_path, spec_of("plain"))
    ours.home.session.close()
    ChainMark(ours.home.path).put(FORK)
    with monkeypatch.context() as patch:
        patch.setattr(chain_mark.Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "EIO")))
        with pytest.raises(DiskFault):
            ours.home.restart()
    ours.home.restart()
    ours.check({0, 1, 2, 3, 4, 5, 6})


def test_a_second_change_of_chain_while_a_worker_starts_is_not_forgotten(tmp_path, monkeypatch):
    """The daemon marks the state again before the worker has obeyed the first mark."""
    ours, _ = parted(tmp_path, spec_of("plain"))
    move, mark = generations.move_older, ChainMark(ours.home.path)

    def moved(*given: Path) -> None:
        mark.put(FORK - 1)
        move(*given)

    with monkeypatch.context() as patch:
        patch.setattr(generations, "move_older", moved)
        ours.leave(FORK)
    assert ours.home.session.started().settled == FORK - 1
    assert mark.first() == FORK - 1
    ours.home.restart()
    assert mark.first() is None


def test_marks(tmp_path):
    assert ChainMark(tmp_path).first() is None
    ChainMark(tmp_path).put(7)
    ChainMark(tmp_path).put(9)
    assert ChainMark(tmp_path).first() == 7, "no worker has read the first one"
    (tmp_path / "leaving-chain").write_bytes(b"")
    assert ChainMark(tmp_path).first() == 0, "as an older version wrote it: all that is kept is looked at again"
    (tmp_path / "leaving-chain").write_bytes(b"x")
    with pytest.raises(CorruptFault):
        ChainMark(tmp_path).first()
