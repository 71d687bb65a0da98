"""Whole nodes in runs with certified summaries: voters certify them, and cut their ledgers behind them."""

import json

import pytest
from msgspec.structs import replace

from atoll.node.daemon.certificates.full_summary import decode_full, encode_full
from atoll.node.daemon.certificates.history import LedgerHistory
from atoll.node.daemon.consensus import machine
from atoll.p2p.ledger.history import StoredLink
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.ids import digest
from atoll.protocols.ledger.records import Contribution, SummaryProposal
from atoll.protocols.run.sections.history import HistorySpec
from atoll.protocols.run.slices import ReduceSpec

KEPT, EVERY = 24, 8
ROUND_S = 10.0


@pytest.fixture(autouse=True)
def window(monkeypatch):
    """Forks are looked at as far back as records are kept, as in the product."""
    monkeypatch.setattr(machine, "DECIDED_KEPT", KEPT)


def certifying(spec):
    return replace(spec, history=HistorySpec(every=EVERY))


def known_final(w):
    return min(node.driver.finality.last_final if node.driver else -1 for node in w.nodes.values())


def certified(node):
    """The summary that a final proposal of each round names, in this node's ledger."""
    last, ledger = node.driver.finality.last_final, node.swarm.ledger
    found = ledger.entries(kind=SummaryProposal)
    return {entry.body.round: entry.body.summary for entry in found if entry.body.round <= last}


def test_all_certify_one_summary_also_after_a_start_and_with_reducers(world):
    async def story() -> None:
        async with world(400, 4, adjust=certifying, reduce=ReduceSpec(above=1, gap=2, k=128)) as w:
            w.start(0, ROUND_S)
            for number in (1, 2, 3):
                w.start(number, ROUND_S, recent=(KEPT, EVERY))
            mute = w.nodes[3]
            mute.worker.mute = True  # it is passed over as a reducer
            await w.until(lambda: known_final(w) >= 44)
            assert set(certified(w.nodes[0])) >= {8, 16, 24, 32, 40}
            full = decode_full(w.nodes[1].swarm.ledger.history.summary)
            assert full.summary.round in (7, 15, 23)
            assert certified(w.nodes[0])[full.summary.round + 1] == full.blob
            assert [missed.peer for missed in full.reducers.missed] == [mute.peer]
            # What a start finds in the summary gives the same later ones.
            await w.kill(1)
            w.start(1, ROUND_S)
            await w.until(lambda: known_final(w) >= 74)
            assert set(certified(w.nodes[0])) >= {48, 56, 64, 72}
            again = decode_full(w.nodes[1].swarm.ledger.history.summary)
            assert again.summary.round > full.summary.round
            assert certified(w.nodes[0])[again.summary.round + 1] == again.blob
            plans = [w.nodes[number].driver.reducer.ledger.plan(known_final(w) + 1) for number in (0, 1, 2)]
            assert plans[0].reducers
            assert plans[0] == plans[1] == plans[2]
            for node in w.nodes.values():
                assert "other_summary" not in (node.home / "events.jsonl").read_text()
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


class OtherMachine(LedgerHistory):
    """Makes other bytes than all others."""

    def certify(self, state, reducers):
        return digest(b"another machine")


def test_a_node_that_finds_another_summary_says_so_and_stops_nobody(world):
    async def story() -> None:
        async with world(400, 4, adjust=certifying) as w:
            for number in range(4):
                w.start(number, ROUND_S)
            await w.until(lambda: all(node.driver is not None for node in w.nodes.values()))
            w.nodes[3].driver.history = OtherMachine(w.nodes[3].swarm.ledger, spec=w.spec)
            await w.until(lambda: known_final(w) >= 60)
            lines = (w.nodes[3].home / "events.jsonl").read_text().splitlines()
            said = [event for event in map(json.loads, lines) if event["event"] == "other_summary"]
            assert said
            assert {event["ours"] for event in said} == {digest(b"another machine").hex()}
            assert len(certified(w.nodes[0])) >= 5
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def cut_up_to(w, *numbers):
    return min(w.nodes[number].driver.history.last_gone for number in numbers)


async def grow_without_the_owner(w):
    """Three members are left, all with recent records; the chain goes from the owner to a summary, and on."""
    for number in range(4):
        w.start(number, ROUND_S, recent=(KEPT, EVERY))
    await w.until(lambda: known_final(w) >= 18)
    await w.kill(0)
    owner = w.nodes.pop(0)
    await w.until(lambda: cut_up_to(w, 1, 2, 3) >= 47)
    for number in (1, 2, 3):
        links = w.nodes[number].swarm.ledger.history.links
        assert len(links) == 2, "from the owner, and from the voters of then"
        assert not w.nodes[number].swarm.ledger.entries(number=5, kind=Contribution), "nobody has round 5"
    return owner


async def join(w, number):
    late = w.start(number, ROUND_S, recent=(KEPT, EVERY))
    await w.until(lambda: late.driver is not None and late.peer in w.nodes[1].driver.finality.voters, 500)
    first = w.nodes[1].driver.finality.last_final
    await w.until(lambda: late.worker.final >= first + 10)
    assert late.driver.history.last_gone >= 47
    assert late.driver.round.syncing == ""
    w.check_agreement()
    await w.check_feeds()
    states = [node.driver.finality for node in w.nodes.values()]
    newest = min(state.last_final for state in states)
    assert len({state.voters for state in states if state.last_final == newest}) == 1
    return late


SLOW = pytest.mark.slow(
    slice=(
        "test_a_newcomer_needs_nobody_who_keeps_all_records, "
        "test_all_certify_one_summary_also_after_a_start_and_with_reducers"
    )
)


@pytest.mark.parametrize("reduce", [None, pytest.param(ReduceSpec(above=1, gap=2, k=128), marks=SLOW)])
def test_a_newcomer_needs_nobody_who_keeps_all_records(world, reduce):
    async def story() -> None:
        async with world(400, 4, adjust=certifying, reduce=reduce) as w:
            await grow_without_the_owner(w)
            late = await join(w, 4)
            # It certifies with the others, keeps as little, and lets the next newcomer in.
            before = late.driver.history.last_gone
            await w.until(lambda: late.driver.history.last_gone > before)
            assert late.swarm.ledger.history.links
            for number in (1, 2, 3):
                links = w.nodes[number].swarm.ledger.history.links
                assert links[-1].name in certified(w.nodes[1]).values()
            await w.kill(4)
            w.start(4, ROUND_S)
            first = w.nodes[1].driver.finality.last_final
            await w.until(lambda: late.driver.finality.last_final >= first + 6)
            w.check_agreement()

    run_virtual(story())


def test_peers_that_serve_false_or_old_summaries_mislead_neither_a_newcomer_nor_who_was_away(world):
    """The one that was away was so for longer than records are kept."""

    async def story() -> None:
        async with world(400, 4, adjust=certifying) as w:
            owner = await grow_without_the_owner(w)
            liar, old = (w.nodes[number].swarm.ledger.history for number in (1, 2))
            first, last = liar.links
            full = decode_full(last.summary)
            mine = replace(full, summary=replace(full.summary, voters=(w.nodes[1].peer,)))
            liar.links = (first, StoredLink(last.link, last.name, encode_full(mine)))
            old.links = (old.links[0],)
            late = await join(w, 4)
            assert late.swarm.ledger.history.links[-1].name not in (first.name, mine.blob)
            assert late.driver.finality.tally.rounds == late.driver.finality.deciding
            last, feed = owner.worker.final, owner.swarm.ledger.vector()[owner.peer]
            w.nodes[0] = owner
            await join(w, 0)
            assert owner.worker.final > last + 10
            assert owner.swarm.ledger.vector()[owner.peer] > feed
            assert not any(node.swarm.ledger.equivocators() for node in w.nodes.values())

    run_virtual(story())
