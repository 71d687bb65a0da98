"""How many chunks a member opens, and what counts as an answer."""

import asyncio
import random
from pathlib import Path

import pytest

from atoll.node.daemon.reduction.audit import Outcome, ReducerAuditor
from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, Unreachable
from atoll.protocols.ids import Round
from atoll.protocols.ledger.reduction import Opening
from atoll.protocols.local.worker_messages import JudgeReply, JudgeRequest
from atoll.protocols.run.arena import Span
from atoll.protocols.run.slices import ReduceSpec
from tests.bench.reducers.council import Council, Lie, shipped


@pytest.mark.parametrize(("members", "chunks"), [(5, 12), (18, 12), (18, 4000), (40, 4000)])
def test_together_the_members_open_the_same_share_of_any_arena(tmp_path, members, chunks):
    council = Council(tmp_path, members, chunks, Lie(chunks=0, is_mute=False), 1, shipped(members))
    rounds = 4 + max(2, 12_000 // chunks // 10)

    async def play() -> None:
        for _ in range(rounds):
            await council.play_round()

    asyncio.run(play())
    # The liar, which opens nothing, is one of the members.
    expected = (rounds - 4) * chunks * 48 / 256 * (members - 2) / (members - 1)
    assert council.opened == pytest.approx(expected, rel=0.25)


class Net:
    """One reducer's answer."""

    def __init__(self, answer, *, is_connected=True):
        self.answer, self.is_connected = answer, is_connected

    async def ask_peer(self, peer, question, cap):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def neighbours(self):
        return [self.reducer] if self.is_connected else []


@pytest.fixture
def audit(small, tmp_path):
    """Opens a chunk: what was found, whether the reducer was blamed, whether it was reached."""
    world = small.world
    claim = world.reduce(1, small.offers)

    async def never(*_):
        raise AssertionError("nothing was to be judged")

    def run(net):
        blamed, unanswered = [], []
        net.reducer = claim.author
        ledger = ReductionLedger(world.peers[0], world.rules, ReduceSpec(above=1, gap=2, k=16))
        for entry in world.entries.values():
            ledger.add(entry)
        ledger._plans[0] = world.plan
        auditor = ReducerAuditor(
            net=net,
            ledger=ledger,
            spool=tmp_path,
            ask=never,
            publish=None,
            on_fault=lambda peer, error: blamed.append(peer),
            on_unanswered=lambda *one: unanswered.append(one),
            patience_s=lambda: 5.0,
            rng=random.Random(1),
        )
        found = asyncio.run(auditor.open(claim, claim.body.span.start))
        return found, blamed == [claim.author], [was_reached for _, _, was_reached in unanswered]

    assert claim.body.round == Round(0)
    return run


def opening(chunk):
    return codec.encode(Opening(Span(chunk, chunk + 1), b"", b"", (), b"", (), b"", ()))


def test_an_empty_reply_is_no_answer(audit):
    assert audit(Net(b"")) == (Outcome.UNANSWERED, False, [True])


def test_an_opening_of_another_chunk_is_no_answer(audit):
    assert audit(Net(opening(999))) == (Outcome.UNANSWERED, True, [True])


@pytest.mark.parametrize("answer", [b"garbage", DecodeError("too large")])
def test_garbage_is_no_answer_and_its_sender_is_blamed(audit, answer):
    assert audit(Net(answer)) == (Outcome.UNANSWERED, True, [True])


def test_a_reducer_that_cannot_be_reached_may_be_gone(audit):
    assert audit(Net(Unreachable("no route"), is_connected=False)) == (Outcome.UNREACHED, False, [False])
    assert audit(Net(Unreachable("stream reset"))) == (Outcome.UNANSWERED, False, [True])


def test_two_questions_about_one_chunk_have_a_file_each(small, tmp_path):
    """A complaint may come while this node's own question about the chunk is judged."""
    world, asked, found = small.world, list[JudgeRequest](), list[bytes]()
    claim = world.reduce(1, small.offers)
    ledger = ReductionLedger(world.peers[0], world.rules, ReduceSpec(above=1, gap=2, k=16))
    for entry in world.entries.values():
        ledger.add(entry)
    ledger._plans[0] = world.plan

    both_asked, first_done = asyncio.Event(), asyncio.Event()

    async def judge(ask, _):
        """The first answer comes when both files are there, the second one when the first file is gone."""
        asked.append(ask)
        if len(asked) == 1:
            await both_asked.wait()
        else:
            both_asked.set()
            await first_done.wait()
        found.append(Path(ask.path).read_bytes())
        return JudgeReply(False)

    async def story():
        net = Net(opening(claim.body.span.start))
        auditor = ReducerAuditor(
            net=net, ledger=ledger, spool=tmp_path, ask=judge, publish=None, on_fault=None, on_unanswered=None,
            patience_s=lambda: 5.0, rng=random.Random(1),
        )  # fmt: skip
        net.reducer = claim.author
        async with asyncio.TaskGroup() as group:
            first, second = (group.create_task(auditor.open(claim, claim.body.span.start)) for _ in range(2))
            first.add_done_callback(lambda _: first_done.set())
        return [first.result(), second.result()]

    assert asyncio.run(story()) == [Outcome.ANSWERED] * 2
    assert len(found) == 2
    assert not list(tmp_path.glob("*.proof"))


def test_a_reducer_asked_again_opens_as_much_as_each_member_draws(small, tmp_path):
    """Else one that is silent at first would be asked for one chunk only, and that one may be right."""
    world = small.world
    claim = world.reduce(1, small.offers)
    ledger = ReductionLedger(world.peers[0], world.rules, ReduceSpec(above=1, gap=2, k=16, sample_256=1 << 16))
    for entry in world.entries.values():
        ledger.add(entry)
    ledger._plans[0] = world.plan
    asked = []

    class Silent(Net):
        async def ask_peer(self, peer, question, cap):
            asked.append(question)
            return opening(claim.body.span.start) if len(asked) <= self.answer else b""

    async def right(*_):
        return JudgeReply(False)

    def opens(answers):
        asked.clear()
        auditor = ReducerAuditor(
            net=Silent(answers), ledger=ledger, spool=tmp_path, ask=right, publish=None, on_fault=None,
            on_unanswered=lambda *one: None, patience_s=lambda: 5.0, rng=random.Random(1),
        )  # fmt: skip
        auditor.net.reducer = claim.author
        return asyncio.run(auditor.opens_now(claim, claim.body.span.start)), len(asked)

    assert opens(2) == (True, 2)
    assert opens(1) == (False, 2)
    assert opens(0) == (False, 1)
