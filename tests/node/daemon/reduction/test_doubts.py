"""Whom a member does not believe, and when it does again."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon.reduction.complaints import Complaints
from atoll.node.daemon.reduction.doubts import DISTRUST_ROUNDS, Doubts
from atoll.protocols.ledger.records import Unanswered


class Here:
    """Member 0, its doubts, and what they lead to. Member 1 reduces."""

    def __init__(self, world) -> None:
        self.world, self.opens, self.final, self.tasks = world, False, -1, []
        self.doubted, self.claims, self.cleared = set(), {}, []
        self.doubts = Doubts(
            ledger=SimpleNamespace(claims=self.claims),
            auditor=SimpleNamespace(opens_now=self.opens_now),
            reports=SimpleNamespace(wrong=frozenset()),
            complaints=Complaints(world.peers[0], lambda body: None, lambda entry: self.doubts.on_silent(entry)),
            start_task=lambda task, _: self.tasks.append(task),
            last_final=lambda: self.final,
            on_doubt=lambda _, refuted, __: self.doubted.update(refuted),
            on_cleared=self.on_cleared,
            on_event=lambda *_: None,
        )

    async def opens_now(self, claim, chunk) -> bool:
        return self.opens

    def on_cleared(self, entry, cleared) -> None:
        self.cleared.append(entry)
        self.doubted -= cleared

    def claim(self, number):
        """A Reduction of member 1, in the ledger."""
        offers = [self.world.offer(who, number) for who in range(5)]
        claim = self.world.reduce(1, offers, number)
        self.claims[claim.entry] = claim
        self.doubts.add_claim(claim)
        return claim

    def work(self) -> None:
        while self.tasks:
            asyncio.run(self.tasks.pop(0))

    def silent(self, claim) -> None:
        """Neither this member nor another gets an opening."""
        body = Unanswered(claim.body.round, claim.entry, claim.body.span.start)
        self.doubts.complaints.add(self.world.peers[2], body, claim)
        self.doubts.on_unanswered(claim, claim.body.span.start, True)
        self.work()

    def distrusted(self, number):
        return set(self.doubts.distrusted(number, 1000))


@pytest.fixture
def here(small):
    found = Here(small.world)
    yield found
    for task in found.tasks:
        task.close()


def test_a_silent_reducer_is_believed_in_no_round_until_it_opens_what_it_did_not(here):
    first = here.claim(0)
    here.silent(first)
    assert here.distrusted(DISTRUST_ROUNDS) == {here.world.peers[1]}
    second = here.claim(1)
    here.work()
    assert here.doubted == {first.entry, second.entry}
    here.opens = True
    third = here.claim(2)
    assert third.entry in here.doubted, "until it has opened it"
    here.work()
    assert here.doubted == here.distrusted(3) == set()
    here.silent(third)
    assert here.doubted == set(), "asked again it opens"


def test_a_final_set_that_holds_the_silent_reduction_ends_the_distrust(here):
    """A quorum heard what this member did not hear."""
    first = here.claim(0)
    here.silent(first)
    second = here.claim(1)
    here.doubts.acquit((second.entry,))
    assert here.distrusted(2) == {here.world.peers[1]}, "not the one that it is about"
    third = here.claim(2)
    here.doubts.acquit((first.entry,))
    assert here.doubted == here.distrusted(3) == set()
    here.work()
    assert third.entry not in here.doubted


def test_what_is_silent_by_itself_stays_so_when_another_one_is_opened(here):
    first = here.claim(0)
    here.silent(first)
    second = here.claim(1)
    body = Unanswered(second.body.round, second.entry, second.body.span.start)
    here.doubts.complaints.add(here.world.peers[2], body, second)
    here.doubts.on_unanswered(second, second.body.span.start, True)
    here.doubts.acquit((first.entry,))
    assert here.doubted == {second.entry}


def test_a_proven_lie_stays_one_whatever_else_of_it_is_opened(here):
    """Another member asked for the chunk that it lied about."""
    first = here.claim(0)
    here.silent(first)
    here.doubts.reports.wrong |= {first.entry}
    here.opens = True
    here.claim(1)
    here.work()
    assert first.entry in here.doubted
    assert first.entry not in here.cleared, "and its slice stays raw"


def test_a_reducer_is_asked_again_for_one_thing_at_a_time(here):
    first = here.claim(0)
    here.silent(first)
    asked, may_end = [], asyncio.Event()

    async def wait(claim, chunk):
        asked.append(chunk)
        await may_end.wait()
        return False

    async def story() -> None:
        here.doubts.auditor.opens_now = wait
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(here.doubts._ask_again(first))
            await asyncio.sleep(0)
            may_end.set()
        await here.doubts._ask_again(first)

    asyncio.run(story())
    assert len(asked) == 2


def test_a_silent_reduction_that_is_forgotten_is_asked_for_no_more(here):
    """The distrust may last much longer than its payload."""
    first = here.claim(0)
    here.silent(first)
    del here.claims[first.entry]
    here.doubts.auditor.forget = lambda: None
    here.doubts.reports.forget = lambda before: None
    here.doubts.forget(1)
    here.opens = True
    second = here.claim(1)
    here.work()
    assert second.entry in here.doubted
