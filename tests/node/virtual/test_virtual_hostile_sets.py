"""Whole nodes beside members that want every round's final set to be their own contributions alone."""

import json

import pytest

from atoll.node.daemon.consensus.types import EntryPayloadHeld, EntrySeen, Event, RoundClosed
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.ballots import voter_order
from atoll.protocols.ledger.records import Body, Contribution, Vote


class Gang:
    """Members whose sets are their own contributions, proposed as soon as one of them may."""

    def __init__(self, nodes, *, sulk: bool) -> None:
        """`sulk`: they vote for no other sets."""
        self.peers, self.sulk = {node.peer for node in nodes}, sulk
        self.sets: dict[int, set[Digest]] = {}
        for node in nodes:
            self._take_over(node.driver)

    def _take_over(self, driver) -> None:
        feed, publish = driver.machines.feed_finality, driver.guard.publish

        def greedy(event: Event) -> None:
            if isinstance(event, RoundClosed):
                return
            feed(event)
            if isinstance(event, EntrySeen | EntryPayloadHeld):
                body = driver.contributions._found.get(event.entry, (None, None))[1]
                ours = self._note(driver, event.entry) if body is not None else ()
                if ours:
                    feed(RoundClosed(body.round, ours))
                    feed(RoundClosed(body.round + 1, ()))  # "more will not come"

        def say(body: Body):
            if self.sulk and isinstance(body, Vote):
                named = driver.finality.books[body.round].proposals[body.proposal].contributions
                if not self.sets[body.round].issuperset(named):
                    return None
            return publish(body)

        driver.machines.feed_finality, driver.guard.publish = greedy, say

    def _note(self, driver, entry: Digest) -> tuple[Digest, ...]:
        author, body = driver.contributions._found[entry]
        assert isinstance(body, Contribution)
        if author in self.peers:
            self.sets.setdefault(body.round, set()).add(entry)
        return tuple(sorted(e for e in self.sets.get(body.round, ()) if driver.contributions.is_held(e)))


def final_sets(node) -> list[set]:
    rows = node.driver.context.log.rows
    return [set(rows[number].contributors) for number in sorted(rows) if rows[number].final]


TWO_LIARS = pytest.mark.slow(slice="test_members_that_propose_themselves_alone_do_not_get_the_run")


@pytest.mark.parametrize(
    ("members", "liars", "sulk", "rounds"),
    [(2, 1, False, 8), (3, 1, True, 9), (4, 1, True, 9), pytest.param(6, 2, True, 8, marks=TWO_LIARS)],
)
def test_members_that_propose_themselves_alone_do_not_get_the_run(world, members, liars, sulk, rounds):
    """At most a third of the members; of two, one that does not stop finality as well.

    A gang proposes where one of it owns the first attempt, which follows from the run's id and the round. In a
    run of ten rounds one of three may have no such turn: then it proposes nothing, and nobody is told of anything.
    """

    async def story() -> None:
        async with world(rounds, members) as w:
            nodes = [w.start(number) for number in range(members)]
            await w.until(lambda: w.newest() >= 2)
            honest, bad = nodes[:-liars], nodes[-liars:]
            gang = Gang(bad, sulk=sulk)
            peers = [node.peer for node in nodes]
            turns = {n for n in range(3, rounds) if voter_order(w.spec.id, n, peers)[0] in gang.peers}
            assert turns
            await w.until(lambda: all(n.worker.final >= rounds - 1 for n in honest), 600.0)
            w.check_agreement()
            for one in final_sets(honest[0]):
                assert len(one - gang.peers) == members - liars
            lines = (honest[0].home / "events.jsonl").read_text().splitlines()
            told = [event for event in map(json.loads, lines) if event["event"] == "narrow_set"]
            assert {event["round"] for event in told} >= turns
            assert all(event["peer"] in gang.peers for event in told)

    run_virtual(story())
