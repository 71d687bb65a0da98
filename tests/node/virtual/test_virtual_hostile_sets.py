"""Whole nodes beside a member that wants a round's final set to be its own contribution alone."""

import pytest

import atoll.node.finality_words as fin
from atoll.p2p.transports.virtual_time import run_virtual
from atoll.protocols.records import Contribution, Vote

ROUNDS = 12


def grasp(node, *, others_too: bool) -> None:
    """From now on the node's sets are its own contributions, proposed as soon as it may.

    `others_too`: it votes for the sets of others as well; else for its own only.
    """
    driver = node.driver
    feed, publish, mine = driver.feed_finality, driver.publish, set()

    def greedy(event: fin.Event) -> None:
        if isinstance(event, fin.RoundClosed):
            return
        feed(event)
        if isinstance(event, fin.EntrySeen) and event.author == driver.me and isinstance(event.body, Contribution):
            mine.add(event.entry)
            feed(fin.PayloadHeld(event.entry))
            feed(fin.RoundClosed(event.body.round, (event.entry,)))
            feed(fin.RoundClosed(event.body.round + 1, ()))  # "it will not grow any more"

    def say(body):
        if isinstance(body, Vote) and not others_too:
            book = driver.finality.books[body.round]
            if not mine.issuperset(book.proposals[body.proposal].contributions):
                return None
        return publish(body)

    driver.feed_finality, driver.publish = greedy, say


def final_sets(node) -> list[set]:
    rows = node.driver.log.rows
    return [set(rows[number].contributors) for number in sorted(rows) if rows[number].final]


@pytest.mark.parametrize("others_too", [True, False])
@pytest.mark.parametrize("members", [4])
def test_a_member_that_proposes_itself_alone_does_not_get_the_run(world, members, others_too):
    async def story() -> None:
        async with world(ROUNDS, members) as w:
            for number in range(members):
                w.start(number)
            await w.until(lambda: w.newest() >= 2)
            grasp(w.nodes[members - 1], others_too=others_too)
            took = await w.until(
                lambda: all(n.worker.final >= ROUNDS - 1 for n in list(w.nodes.values())[:-1]), 1500.0
            )
            w.check_agreement()
            print(took, [len(one) for one in final_sets(w.nodes[0])])
            assert all(2 * len(one) > members for one in final_sets(w.nodes[0]))

    run_virtual(story())
