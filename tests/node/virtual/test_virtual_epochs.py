"""Whole nodes: members leave for good, and the others go on; both sides of a cut go on, and meet in one chain."""

import asyncio
import errno
import json
from functools import partial
from itertools import pairwise

import msgspec
import pytest

from atoll.node.ipc.chain_mark import MARK
from atoll.node.runs.presets import preset
from atoll.p2p.system.atomic_files import disk_fault
from atoll.p2p.system.disk_reports import DISK_RETRY_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.identity import Identity
from atoll.protocols.ledger.records import Body, Entry, Follow
from tests.node.virtual.conftest import MarkOf

ROUND_S, SHORT_S = 10.0, 0.5
OWNER = Identity(bytes([1]) * 32).peer_id


def finals(w, *numbers):
    return [w.nodes[number].worker.final for number in numbers]


def test_short_rounds_are_final_three_round_times_after_the_lease(world):
    """The killed member's work of before decides a round more: it is waited for once, and no seconds."""

    async def story() -> None:
        now = asyncio.get_running_loop().time
        async with world(4000, 2) as w:
            for number in range(2):
                w.start(number, SHORT_S)
            await w.until(lambda: w.all_final(9), look_s=SHORT_S / 50)
            began = w.newest()
            await w.until(lambda: w.newest() > began, look_s=SHORT_S / 50)
            driver = w.nodes[0].driver
            killed_s, at = now(), driver.round.round
            await w.kill(1)
            await w.until(lambda: driver.finality.last_final >= at, look_s=SHORT_S / 50)
            assert now() - killed_s <= w.spec.pace.lease_s + 3 * SHORT_S

    run_virtual(story())


HALF = pytest.param(4, 2, marks=pytest.mark.slow(slice="test_the_others_go_on_when_members_leave_for_good"))


@pytest.mark.parametrize(("count", "gone"), [(2, 1), (3, 2), HALF, (4, 3)])
@pytest.mark.parametrize("way", ["stop", "kill"])
def test_the_others_go_on_when_members_leave_for_good(world, count, gone, way):
    async def story() -> None:
        async with world(60, count) as w:
            for number in range(count):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(count))) >= 4)
            leaving, staying = range(count - gone, count), range(count - gone)
            for number in leaving:
                await (w.stop(number) if way == "stop" else w.kill(number))
            before = max(finals(w, *staying))
            took_s = await w.until(lambda: min(finals(w, *staying)) > before)
            assert took_s <= (2 * ROUND_S if way == "stop" else w.spec.pace.lease_s + 3 * ROUND_S) + ROUND_S
            await w.until(lambda: min(finals(w, *staying)) >= before + 15)
            w.check_agreement()
            await w.check_feeds()
            # The first who comes back works with the others again.
            w.start(leaving[0], ROUND_S)
            await w.until(lambda: min(finals(w, leaving[0], *staying)) >= before + 20)
            w.check_agreement()
            assert not w.changes

    run_virtual(story())


TWO_AND_TWO = pytest.param(
    (2, 2),
    marks=pytest.mark.slow(
        slice=(
            "test_both_sides_of_a_cut_go_on_and_meet, "
            "test_healed_sides_have_one_digest_within_three_rounds_at_the_presets_pace[sizes1]"
        )
    ),
)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), TWO_AND_TWO])
def test_both_sides_of_a_cut_go_on_and_meet(world, sizes):
    async def story() -> None:
        count = sum(sizes)
        async with world(200, 1) as w:
            for number in range(count):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(count))) >= 4)
            peers = [w.nodes[number].peer for number in range(count)]
            w.network.cut(peers[: sizes[0]], peers[sizes[0] :])
            before = max(finals(w, *range(count)))
            await asyncio.sleep(w.spec.pace.lease_s + 30 * ROUND_S)
            assert min(finals(w, *range(count))) > before + 10
            w.network.heal()
            healed = max(finals(w, *range(count)))
            await w.until(lambda: min(finals(w, *range(count))) > healed + 5)
            w.check_agreement()
            assert len(w.changes) == min(sizes)

    run_virtual(story())


async def two_and_one_apart(w) -> None:
    """Three nodes work together, then two and one for so long that each side has an epoch."""
    for number in range(3):
        w.start(number, ROUND_S)
    await w.until(lambda: min(finals(w, 0, 1, 2)) >= 4)
    peers = [w.nodes[number].peer for number in range(3)]
    w.network.cut(peers[:2], peers[2:])
    await asyncio.sleep(w.spec.pace.lease_s + 10 * ROUND_S)


def test_a_node_that_changes_its_chain_never_leaves_its_neighbours(world):
    async def story() -> None:
        async with world(200, 1) as w:
            await two_and_one_apart(w)
            w.network.heal()
            healed = max(finals(w, 0, 1, 2))
            await w.until(lambda: min(finals(w, 0, 1, 2)) > healed + 2)
            (leaver,) = (w.nodes[number] for number, _ in w.changes)
            events = map(json.loads, (leaver.home / "events.jsonl").read_text().splitlines())
            changed_s = [event["time"] for event in events if event["event"] == "other_chain"]
            for node in w.nodes.values():
                if node is not leaver:
                    known = node.swarm.discovery.book.get(leaver.peer)
                    # The first of the two tells it, perhaps before the dial of the other one gets through.
                    assert known.connected_at < changed_s[0] + 0.5, "and not again since"
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def killed_at_the_mark(w, group: asyncio.TaskGroup, mark) -> list[int]:
    """Each node does `mark` in place of its mark, dies then, and starts again. The numbers of those that died."""
    died: list[int] = []

    async def die(number: int) -> None:
        await w.kill(number)
        died.append(number)
        w.start(number)

    def mark_and_die(node, first: int) -> None:
        mark(node, first)
        group.create_task(die(node.number))

    for node in w.nodes.values():
        node.driver.chain_exit.mark = MarkOf(partial(mark_and_die, node))
    return died


def test_a_node_that_dies_while_it_changes_its_chain_changes_it_at_its_next_start(world):
    async def story() -> None:
        async with world(200, 1) as w, asyncio.TaskGroup() as group:
            await two_and_one_apart(w)

            def mark(node, first: int) -> None:
                assert not node.swarm.ledger.entries(kind=Follow, author=node.peer), "a kill now leaves no mark"
                node._mark(first)  # the Follow comes next

            died = killed_at_the_mark(w, group, mark)
            w.network.heal()
            healed = max(finals(w, 0, 1, 2))
            await w.until(lambda: min(finals(w, 0, 1, 2)) > healed + 2)
            assert died == [number for number, _ in w.changes]
            assert len(died) == 1, "once: the ledger says after the start which chain it follows"
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def refuses(node, refused: list[float], refusals: int, name: str) -> None:
    """Note a try of the node that must change its chain; raise DiskFault at so many of the first ones."""
    refused.append(asyncio.get_running_loop().time())
    if len(refused) <= refusals:
        raise disk_fault(OSError(errno.ENOSPC, "full"), node.home / name)


async def changed_once(w, tries: list[float], refusals: int) -> None:
    """Heal; one node changes its chain, once, and only after so many refusals of its disk."""
    w.network.heal()
    healed = max(finals(w, 0, 1, 2))
    await w.until(lambda: min(finals(w, 0, 1, 2)) > healed + 2)
    ((number, _),) = w.changes
    assert len(tries) == refusals + 1, "asked again each time"
    assert all(later - before >= DISK_RETRY_S for before, later in pairwise(tries)), "and not at each event"
    assert not w.nodes[number].driver.view().trouble
    events = map(json.loads, (w.nodes[number].home / "events.jsonl").read_text().splitlines())
    kinds = [event["event"] for event in events]
    assert (kinds.count("trouble"), kinds.count("trouble_over"), kinds.count("other_chain")) == (1, 1, 1)
    w.check_agreement()
    await w.check_feeds()


@pytest.mark.parametrize("refusals", [1, 8])
def test_a_node_whose_disk_refuses_the_mark_lives_and_changes_its_chain_once_it_takes_it(world, refusals):
    async def story() -> None:
        async with world(200, 1) as w:
            await two_and_one_apart(w)
            tries: list[float] = []

            def mark(node, first: int) -> None:
                refuses(node, tries, refusals, MARK)
                assert not node.swarm.ledger.entries(kind=Follow, author=node.peer), "no entry before the mark"
                node._mark(first)

            for node in w.nodes.values():
                node.driver.chain_exit.mark = MarkOf(partial(mark, node))
            await changed_once(w, tries, refusals)

    run_virtual(story())


EIGHT = pytest.param(
    8,
    marks=pytest.mark.slow(
        slice=(
            "test_a_node_whose_ledger_refuses_stays_in_its_chain_until_it_says_that_it_leaves[1], "
            "test_a_node_whose_disk_refuses_the_mark_lives_and_changes_its_chain_once_it_takes_it[8]"
        )
    ),
)


@pytest.mark.parametrize("refusals", [1, EIGHT])
def test_a_node_whose_ledger_refuses_stays_in_its_chain_until_it_says_that_it_leaves(world, refusals):
    """A limit of the size of files refuses the ledger and not the mark, whose file is new."""

    async def story() -> None:
        async with world(200, 1) as w:
            await two_and_one_apart(w)
            tries: list[float] = []

            def publish(node, whole, body: Body) -> Entry:
                if isinstance(body, Follow) and body.epoch != node.driver.finality.epoch:
                    assert node.left, "no entry before the mark"
                    refuses(node, tries, refusals, "ledger")
                return whole(body)

            for node in w.nodes.values():
                net = node.driver.net
                net.publish = partial(publish, node, net.publish)
            await changed_once(w, tries, refusals)

    run_virtual(story())


@pytest.mark.parametrize("is_marked", [True, False])
def test_a_node_that_ended_without_its_mark_leaves_the_chain_of_its_state_at_its_next_start(world, is_marked):
    """An epoch that it signed itself needs no further entry, and its disk refused the mark until it was killed."""

    async def story() -> None:
        async with world(200, 1) as w, asyncio.TaskGroup() as group:
            for number in range(2):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, 0, 1)) >= 4)
            w.network.cut([w.nodes[0].peer], [w.nodes[1].peer])
            await asyncio.sleep(w.spec.pace.lease_s + 10 * ROUND_S)

            def mark(node, first: int) -> None:
                if is_marked:
                    node._mark(first)

            died = killed_at_the_mark(w, group, mark)
            w.network.heal()
            healed = max(finals(w, 0, 1))
            await w.until(lambda: min(finals(w, 0, 1)) > healed + 2)
            # Without the mark it leaves twice, then because its state is not of the chain that it chose.
            assert [number for number, _ in w.changes] == died * (1 if is_marked else 2)
            w.check_agreement()
            await w.check_feeds()

    run_virtual(story())


def is_one_chain(w):
    """Whether all nodes have one digest of the newest round that is final on all of them."""
    rows = [
        {row.round: row.digest for row in node.driver.context.log.rows.values() if row.final}
        for node in w.nodes.values()
        if node.driver is not None
    ]
    common = min(max(each, default=-1) for each in rows)
    return len(rows) == len(w.nodes) and len({each.get(common) for each in rows}) == 1


HEALED = pytest.mark.slow(
    slice=(
        "test_healed_sides_have_one_digest_within_three_rounds_at_the_presets_pace, "
        "test_a_minority_is_back_within_three_short_rounds_whenever_the_cut_heals"
    )
)


@pytest.mark.parametrize("sizes", [pytest.param((2, 1), marks=HEALED), (2, 2), pytest.param((3, 1), marks=HEALED)])
def test_healed_sides_have_one_digest_within_three_rounds_at_the_presets_pace(world, sizes):
    async def story() -> None:
        count, pace = sum(sizes), msgspec.structs.asdict(preset("tiny", OWNER, 1).pace)
        pace = {key: value for key, value in pace.items() if value is not msgspec.UNSET and key != "min_members"}
        async with world(200, 1, **pace) as w:
            for number in range(count):
                w.start(number, ROUND_S)
            await w.until(lambda: min(finals(w, *range(count))) >= 4)
            peers = [w.nodes[number].peer for number in range(count)]
            w.network.cut(peers[: sizes[0]], peers[sizes[0] :])
            await asyncio.sleep(w.spec.pace.lease_s + 30 * ROUND_S)
            assert not is_one_chain(w)
            w.network.heal()
            healed = max(finals(w, *range(count)))
            took_s = await w.until(lambda: min(finals(w, *range(count))) > healed and is_one_chain(w))
            assert took_s <= 3 * ROUND_S
            assert max(finals(w, *range(count))) - healed <= 3
            w.check_agreement()

    run_virtual(story())


MOMENTS = pytest.mark.slow(slice="test_a_minority_is_back_within_three_short_rounds_whenever_the_cut_heals")


@pytest.mark.parametrize(
    "moment_s", [0.0, pytest.param(0.7, marks=MOMENTS), 1.3, pytest.param(2.0, marks=MOMENTS)]
)
def test_a_minority_is_back_within_three_short_rounds_whenever_the_cut_heals(world, moment_s):
    """As `make chaos` plays it: leases of 6 s, rounds of about two, a cut of 30 s."""

    async def story() -> None:
        async with world(200, 1, quorum_256=192, grace_256=128, lease_s=6.0) as w:
            for number in range(4):
                w.start(number, 2.0)
            await w.until(lambda: min(finals(w, *range(4))) >= 4)
            peers = [w.nodes[number].peer for number in range(4)]
            w.network.cut(peers[:3], peers[3:])
            await asyncio.sleep(30.0 + moment_s)
            assert not is_one_chain(w)
            w.network.heal()
            healed = max(finals(w, *range(4)))
            await w.until(lambda: min(finals(w, *range(4))) > healed and is_one_chain(w), look_s=0.1)
            assert max(finals(w, *range(4))) - healed <= 3
            assert len(w.changes) == 1
            w.check_agreement()

    run_virtual(story())


PRESET = {"lease_s": 60.0, "quorum_256": 192, "grace_256": 128}


def test_two_of_three_that_were_down_for_two_leases_undo_no_round_of_the_third(world):
    """They come up in one moment, as a quorum, and know no round time yet. A newcomer joined meanwhile."""

    async def story() -> None:
        async with world(4000, 1, **PRESET) as w:
            for number in range(3):
                w.start(number, 10.0)
            await asyncio.sleep(70.0)
            for number in (1, 2):
                await w.kill(number)
            await asyncio.sleep(140.0)
            w.start(9, 10.0)
            await asyncio.sleep(30.0)
            for number in (1, 2):
                w.start(number)
            final = w.nodes[0].worker.final
            await w.until(lambda: all(node.worker.final >= final + 3 for node in w.nodes.values()), 90.0)
            assert not w.changes, "nobody left its chain"
            w.check_agreement()

    run_virtual(story())
