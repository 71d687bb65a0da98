"""A worker that is killed anywhere while folds and final sets come in any order: no work is lost or said twice.

With β = 1 the law is exact but for rounding: what is left in the error feedback, and what final sets used, is
together what the rounds gave. And whatever befell a member, its final state is that of another.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from atoll.node.checkpoint import local
from atoll.node.checkpoint.generations import Unfinished
from atoll.node.worker.local_weights import LocalWeights
from atoll.protocols.ids import Round
from atoll.protocols.local import worker_messages
from atoll.protocols.local.worker_messages import FinalizeRequest, FoldRequest, TrainReply
from atoll.protocols.run.run_spec import RunSpec, Stage
from tests.node.worker.session_home import ME, OTHER, SPEC, Home, given, member, said

ROUNDS, STEPS = 4, 3


class Killed(BaseException):
    """Nothing in the worker runs any more."""


def spec_of(fragments: int, overlap_steps: int) -> RunSpec:
    outer = msgspec.structs.replace(
        SPEC.outer, stages=(Stage(0, STEPS),), fragments=fragments, overlap_steps=overlap_steps, keep_256=160
    )
    return msgspec.structs.replace(
        SPEC, outer=outer, compress=msgspec.structs.replace(SPEC.compress, feedback=1.0)
    )


class Member:
    """What a daemon does with its worker, with luck instead of a swarm."""

    def __init__(
        self, folder: Path, spec: RunSpec, theirs: list[worker_messages.Member], luck: random.Random
    ) -> None:
        self.home, self.spec, self.theirs, self.luck = Home(folder / "me", ME, spec), spec, theirs, luck
        self.folder = folder
        self.mine: dict[int, worker_messages.Member] = {}
        self.said: dict[int, torch.Tensor] = {}
        self.given: dict[int, torch.Tensor] = {}
        self.sets: dict[int, tuple[worker_messages.Member, ...]] = {}
        self.final = -1
        self.at_hand = 0
        self._like = self.home.session._feedback.residual_C4096

    def train(self, number: int) -> None:
        self.at_hand = number
        while number not in self.mine:
            try:
                self.keep(number, self.attempt(number))
            except Killed:
                self.restart()

    def attempt(self, number: int) -> TrainReply:
        after = number - 1 if self.spec.outer.overlap_steps and number and number - 1 not in self.sets else -1
        sending = self.home.session._feedback
        encode = sending.encode

        def listen(at: int, weights: LocalWeights) -> bytearray:
            self.given[at] = given(at, weights, self._like, self.spec)  # made anew where it was not saved
            return encode(at, weights)

        sending.encode = listen
        steps = self.home.session.train(self.home.train_ask(number, after))
        while not isinstance(event := self.one_step(steps), TrainReply):
            if event is None:
                self.luck.choice([self.fold, self.finalize])(number - 1)
            elif self.luck.random() < 0.3:
                self.something(number)
        if self.luck.random() < 0.3:
            self.something(number)  # while the disk works
        self.home.keep(number)
        return event

    def one_step(self, steps: object) -> object:
        """Perhaps killed in it: before a generation is begun, when its payload is a file, or when it is there."""
        if self.luck.random() > 0.1:
            return next(steps)
        begin, when = local.begin_local, self.luck.choice(["before", "between", "after"])

        def die(*args: object, **named: object) -> object:
            if when == "before":
                raise Killed
            generation = begin(*args, **named)
            finish, generation.finish = generation.finish, lambda: die_after(finish, generation)
            return generation

        def die_after(finish: Callable[[], None], generation: Unfinished) -> None:
            if when == "after":
                finish()
            generation._close()  # as the end of a process does
            raise Killed

        local.begin_local = die
        try:
            event = next(steps)
            if isinstance(event, TrainReply):
                self.home.session._async_save.wait()
            return event
        finally:
            local.begin_local = begin

    def something(self, number: int) -> None:
        what = self.luck.choice(["kill", "fold", "finalize", "finalize", "late"])
        if what == "kill":
            raise Killed
        if what == "fold" and number:
            self.fold(number - 1)
        elif what == "finalize" and self.final + 1 < number:
            self.finalize(self.final + 1)
        elif what == "late" and self.sets.keys() - set(range(self.final + 1)):
            self.fold(self.luck.choice(sorted(self.sets.keys() - set(range(self.final + 1)))))

    def fold(self, number: int) -> None:
        """With any of both contributions."""
        if number > self.final:
            self.sets[number] = self.luck.choice([self.both(number), (self.mine[number],), (self.theirs[number],)])
            self.home.ask(FoldRequest(Round(number), self.sets[number]))

    def both(self, number: int) -> tuple[worker_messages.Member, ...]:
        return self.mine[number], self.theirs[number]

    def finalize(self, number: int) -> None:
        for at in range(self.final + 1, number + 1):
            self.sets[at] = self.luck.choice([self.both(at), (self.theirs[at],)])
            self.final = at
            self.home.ask(FinalizeRequest(Round(at), self.sets[at]))

    def restart(self) -> None:
        """As the daemon does: what is final again, then what is closed; work that was saved is announced."""
        self.home.session._async_save.wait()
        started = self.home.restart()
        for at in range(started.final + 1, self.final + 1):
            self.home.ask(FinalizeRequest(Round(at), self.sets[at]))
        for pending in started.pending:
            if pending.round == self.at_hand and pending.round not in self.mine:
                self.keep(pending.round, TrainReply(pending, 0, 0.0))
        for at in sorted(self.sets.keys() - set(range(self.final + 1))):
            self.home.ask(FoldRequest(Round(at), self.sets[at]))

    def keep(self, number: int, done: TrainReply) -> None:
        """The blob store has a name of its own for the payload."""
        path = self.folder / f"{number}.blob"
        shutil.copy(done.pending.path, path)
        self.said[number] = said(done.pending, self._like, self.spec)
        self.mine[number] = member(msgspec.structs.replace(done.pending, path=str(path)))
        if not self.spec.outer.overlap_steps:
            self.fold(number)
        if self.luck.random() < 0.2:
            self.restart()


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., tuple[Member, Home]]:
    def run(fragments: int, overlap_steps: int, seed: int) -> tuple[Member, Home]:
        spec = spec_of(fragments, overlap_steps)
        other = Home(tmp_path / "other", OTHER, spec)
        theirs = []
        for number in range(ROUNDS):
            pending = other.train(number).pending
            path = tmp_path / f"their-{number}.blob"
            shutil.copy(pending.path, path)
            theirs.append(member(msgspec.structs.replace(pending, path=str(path)), OTHER))
        one = Member(tmp_path, spec, theirs, random.Random(f"{fragments} {overlap_steps} {seed}"))
        for number in range(ROUNDS):
            one.train(number)
        one.finalize(ROUNDS - 1)
        return one, other

    return run


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fragments", "overlap_steps"), [(1, 0), (1, 2), (2, 0), (2, 2), (2, 9)])
def test_work_is_used_or_kept_once(play, fragments, overlap_steps, seed):
    one, other = play(fragments, overlap_steps, seed)
    used = sum((one.said[at] for at in one.said if one.mine[at] in one.sets[at]), torch.zeros_like(one._like))
    kept = one.home.session._feedback.residual_C4096
    assert torch.allclose(kept + used, sum(one.given.values()), atol=1e-6)
    for at in range(ROUNDS):
        state = other.ask(FinalizeRequest(Round(at), one.sets[at])).state
    assert one.home.session.started().state == state
    assert one.home.session._fold.view_digest() == state
    assert torch.equal(kept, one.home.residual()), "and it is saved"
