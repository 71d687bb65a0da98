"""Getting payloads: from the author, else from others, again and again until they are held or not needed."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from atoll.node.daemon.coordinator.payload_fetcher import (
    FIRST_S,
    OF_STRANGERS,
    PARALLEL,
    SMALL_BYTES,
    PayloadFetcher,
)
from atoll.p2p.blobs.asking import LAST_RETRY_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import AtollError, DecodeError, DiskFault, LocalFault, Unreachable
from atoll.protocols.ids import Digest, PeerId, Round, digest
from atoll.protocols.ledger.records import Contribution, SlicedContribution
from atoll.protocols.local.contribution_forms import PayloadRecord

AUTHOR, *OTHERS = (PeerId(f"p{n}") for n in range(9))
ONE = digest(b"payload")


def record(payload: Digest, number: int, rows: bytes = b"") -> Contribution:
    """A contribution to this round with this payload."""
    fields = (Round(number), digest(b"base"), payload, 1, 1, 64, 1.0)
    return SlicedContribution(*fields, Digest(rows)) if rows else Contribution(*fields)


class Shelf:
    """Blobs of one node, and what its neighbours hold. Obeys `BlobSource`."""

    def __init__(self, folder: Path, blob_bytes: int) -> None:
        self.folder, self.blob_bytes = folder, blob_bytes
        self.here: set[Digest] = set()
        self.connected = [AUTHOR, *OTHERS]
        self.holding: dict[PeerId, set[Digest]] = {}
        self.full = False
        self.asked: list[tuple[float, list[PeerId]]] = []
        self.at_work = self.most_at_work = 0
        self.takes_s = 0.1

    def has_blob(self, blob: Digest) -> bool:
        return blob in self.here

    def blob_path(self, blob: Digest) -> Path:
        if blob not in self.here:
            raise LocalFault("not here")
        return self.folder / blob.hex()

    def delete_blob(self, blob: Digest) -> None:
        self.here.discard(blob)

    def neighbours(self) -> list[PeerId]:
        return list(self.connected)

    async def fetch_blob(self, blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
        self.asked.append((asyncio.get_running_loop().time(), holders))
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            await asyncio.sleep(self.takes_s)
        finally:
            self.at_work -= 1
        if self.full:
            raise DiskFault("no space")
        if not any(blob in self.holding.get(peer, ()) for peer in holders):
            raise Unreachable("from no holder")
        if self.blob_bytes > max_bytes:
            raise DecodeError(f"blob has {self.blob_bytes} bytes where at most {max_bytes} are legal")
        self.here.add(blob)
        return self.blob_path(blob)


class Rig:
    def __init__(self, folder: Path, payload_bytes: int = 1000) -> None:
        self.shelf = Shelf(folder, payload_bytes)
        self.held: list[Digest] = []
        self.faults: list[tuple[PeerId, AtollError]] = []
        self.disk: list[DiskFault] = []
        self.bad: set[Digest] = set()
        self.void: list[Digest] = []
        self.group: asyncio.TaskGroup | None = None
        self.payloads = PayloadFetcher(
            blobs=self.shelf,
            size_of=lambda record: payload_bytes,
            verify=self.verify,
            start_task=lambda work, name: self.group.create_task(work, name=name),
            post=lambda event: event(),
            on_fault=lambda peer, error: self.faults.append((peer, error)),
            on_disk_fault=self.disk.append,
        )
        self.payloads.subscribe(self.resolved)

    def resolved(self, payload: Digest) -> None:
        is_void = any(key[0] == payload for key in self.payloads._void)
        (self.void if is_void else self.held).append(payload)

    async def verify(self, path: Path, record: PayloadRecord) -> None:
        if Digest(bytes.fromhex(path.name)) in self.bad:
            raise DecodeError("not a payload")


Story = Callable[[Rig, asyncio.TaskGroup], Awaitable[None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Rig]:
    """Runs a story on virtual time; tasks that it leaves behind are cancelled."""

    def run(story: Story, **options: int) -> Rig:
        rig = Rig(tmp_path, **options)

        async def main() -> None:
            async with asyncio.TaskGroup() as outer:

                async def inner() -> None:
                    async with asyncio.TaskGroup() as group:
                        rig.group = group
                        await story(rig, group)
                        raise asyncio.CancelledError

                outer.create_task(inner())

        run_virtual(main())
        return rig

    return run


def test_the_author_alone_is_asked_for_a_small_payload(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.holding = {peer: {ONE} for peer in (AUTHOR, *OTHERS)}
        assert not rig.payloads.is_held(record(ONE, 0))
        for _ in range(3):
            rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)
        assert rig.payloads.is_held(record(ONE, 0))
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)

    rig = play(story)
    assert [holders for _, holders in rig.shelf.asked] == [[AUTHOR]]
    assert rig.held == [ONE]


def test_a_payload_that_waits_costs_nothing_until_it_is_needed_and_then_comes_soon(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.holding = {AUTHOR: {ONE, (other := digest(b"other"))}}
        late = {3: asyncio.Event()}
        rig.payloads.waits = late.get
        rig.payloads.fetch(record(ONE, 3), AUTHOR)
        rig.payloads.fetch(record(other, 4), AUTHOR)
        await asyncio.sleep(600.0)
        assert rig.held == [other]
        late.pop(3).set()
        await asyncio.sleep(1.0)
        assert rig.held == [other, ONE]

    rig = play(story)
    assert [holders for _, holders in rig.shelf.asked] == [[AUTHOR]] * 2


def test_a_payload_that_begins_to_wait_in_the_queue_is_not_fetched(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        payloads = [digest(b"%d" % number) for number in range(PARALLEL)]
        rig.shelf.holding = {AUTHOR: {*payloads}}
        for number, payload in enumerate(payloads):
            rig.payloads.fetch(record(payload, number), AUTHOR)
        await asyncio.sleep(rig.shelf.takes_s / 2)
        at_work = len(rig.shelf.asked)
        rig.payloads.waits = lambda number: asyncio.Event()
        await asyncio.sleep(60.0)
        assert len(rig.held) == len(rig.shelf.asked) == at_work < len(payloads)

    play(story)


def test_a_large_payload_comes_from_many_at_once(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(0.2)

    assert play(story, payload_bytes=SMALL_BYTES + 1).shelf.asked[0][1] == [AUTHOR, *OTHERS]


@pytest.mark.parametrize("holder", OTHERS)
def test_whoever_holds_it_is_found_when_the_author_is_gone(play, holder):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.connected = OTHERS
        rig.shelf.holding = {holder: {ONE}}
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(10.0)

    rig = play(story)
    assert rig.held == [ONE]
    assert max(len(holders) for _, holders in rig.shelf.asked) <= 4


def test_an_author_whom_we_do_not_know_directly_is_dialled(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.connected = OTHERS
        rig.shelf.holding = {AUTHOR: {ONE}}
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(5.0)

    rig = play(story)
    assert rig.held == [ONE]
    assert AUTHOR not in rig.shelf.asked[0][1]


def test_it_is_tried_for_ever_but_not_without_rest_until_its_round_is_final(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.payloads.fetch(record(ONE, 4), AUTHOR)
        await asyncio.sleep(600.0)
        rig.payloads.forget(Round(3))
        before = len(rig.shelf.asked)
        await asyncio.sleep(30.0)
        assert len(rig.shelf.asked) > before
        rig.payloads.forget(Round(4))
        await asyncio.sleep(LAST_RETRY_S + 1)
        before = len(rig.shelf.asked)
        await asyncio.sleep(600.0)
        assert len(rig.shelf.asked) == before

    rig = play(story)
    times = [at for at, _ in rig.shelf.asked]
    gaps = [round(b - a, 6) for a, b in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert LAST_RETRY_S <= gaps[-1] <= LAST_RETRY_S + 1
    assert rig.held == []


def test_bytes_that_do_not_decode_are_void_and_blamed_on_their_author_once(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.bad.add(ONE)
        rig.shelf.holding = {AUTHOR: {ONE}}
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)
        assert not rig.payloads.is_held(record(ONE, 0))

    rig = play(story)
    assert [(peer, type(error)) for peer, error in rig.faults] == [(AUTHOR, DecodeError)]
    assert (len(rig.shelf.asked), rig.held, rig.shelf.here) == (1, [], set())


def test_a_blob_above_the_legal_size_is_not_fetched_and_blamed_on_the_author(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.blob_bytes += 1
        rig.shelf.holding = {peer: {ONE} for peer in (AUTHOR, *OTHERS)}
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(60.0)
        assert rig.payloads.is_void(record(ONE, 0))

    rig = play(story)
    assert [(peer, type(error)) for peer, error in rig.faults] == [(AUTHOR, DecodeError)]
    assert (len(rig.shelf.asked), rig.held, rig.void, rig.shelf.here) == (1, [], [ONE], set())


def test_a_full_disk_is_told_and_waited_out(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.holding, rig.shelf.full = {AUTHOR: {ONE}}, True
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(3.0)
        assert rig.disk
        rig.shelf.full = False
        await asyncio.sleep(LAST_RETRY_S + 1)

    assert play(story).held == [ONE]


def test_few_at_a_time_and_one_that_hangs_does_not_stop_the_others(play):
    many = [digest(bytes([n])) for n in range(3 * PARALLEL)]

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.holding = {AUTHOR: set(many[1:])}
        for number, payload in enumerate(many):
            rig.payloads.fetch(record(payload, 0), [AUTHOR, *OTHERS][number % 3])
        await asyncio.sleep(3.0)

    rig = play(story)
    assert sorted(rig.held) == sorted(many[1:])
    assert rig.shelf.most_at_work == PARALLEL


def test_a_payload_that_the_disk_damaged_is_fetched_again(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.here.add(ONE)
        rig.bad.add(ONE)
        rig.shelf.holding = {AUTHOR: {ONE}}
        mending = group.create_task(rig.payloads.restore(record(ONE, 0), AUTHOR))
        await asyncio.sleep(0.05)
        rig.bad.clear()
        await mending
        assert rig.shelf.has_blob(ONE)

    rig = play(story)
    assert len(rig.shelf.asked) == 1
    assert rig.faults == [], "it was fine when it came"


def test_what_lies_on_the_disk_counts_only_after_a_look(play):
    """A blob of that name may be a snapshot, or have come just before a kill. What is no payload stays."""

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        two = digest(b"another")
        rig.shelf.here, rig.bad = {ONE, two}, {ONE}
        for payload in (ONE, two):
            assert not rig.payloads.is_held(record(payload, 0))
            rig.payloads.fetch(record(payload, 0), AUTHOR)
        await asyncio.sleep(1.0)
        assert not rig.payloads.is_held(record(ONE, 0))
        assert rig.payloads.is_held(record(two, 0))
        assert rig.shelf.here == {ONE, two}

    rig = play(story)
    assert (rig.shelf.asked, len(rig.faults)) == ([], 1)


def test_a_payload_of_one_fragment_is_not_one_of_another(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.payloads.size_of = lambda record: 1000 + record.round % 2

        async def verify(path: Path, record: PayloadRecord) -> None:
            if record.round % 2:
                raise DecodeError("of another size")

        rig.payloads.verify = verify
        rig.shelf.holding = {AUTHOR: {ONE}}
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)
        rig.payloads.fetch(record(ONE, 1), OTHERS[0])
        await asyncio.sleep(1.0)
        assert [rig.payloads.is_held(record(ONE, number)) for number in range(4)] == [True, False, True, False]

    rig = play(story)
    assert [peer for peer, _ in rig.faults] == [OTHERS[0]]
    assert len(rig.shelf.asked) == 1


def test_a_payload_with_these_rows_is_not_one_with_others(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        async def verify(path: Path, record: PayloadRecord) -> None:
            if record.rows != b"true":
                raise DecodeError("of another root")

        rig.payloads.verify = verify
        rig.shelf.holding = {AUTHOR: {ONE}}
        for rows, author in ((b"true", AUTHOR), (b"false", OTHERS[0])):
            rig.payloads.fetch(record(ONE, 0, rows=rows), author)
            await asyncio.sleep(1.0)
        assert rig.payloads.is_held(record(ONE, 0, rows=b"true"))
        assert rig.payloads.is_void(record(ONE, 0, rows=b"false"))
        assert rig.shelf.here == {ONE}

    rig = play(story)
    assert [peer for peer, _ in rig.faults] == [OTHERS[0]]
    assert (rig.held, rig.void) == ([ONE], [ONE])


def test_made_up_payloads_of_one_neighbour_keep_nobody_waiting(play):
    """Forty authors that one neighbour brought, whose payloads nobody has; others' come as if these were not."""
    bringer, newcomer, member = OTHERS[0], OTHERS[1], OTHERS[2]
    own, theirs = digest(b"own"), digest(b"theirs")

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.takes_s = 15.0
        rig.shelf.holding = {newcomer: {own}, member: {theirs}}
        rig.payloads.bringer_of = lambda author: {newcomer: newcomer, member: None}.get(author, bringer)
        for number in range(40):
            rig.payloads.fetch(record(digest(bytes([number])), 0), PeerId(f"eve{number}"))
        await asyncio.sleep(1.0)
        assert rig.shelf.at_work == 1
        assert rig.shelf.asked[0][1] == [bringer], "a made-up author is not dialled"
        rig.payloads.fetch(record(own, 0), newcomer)
        rig.payloads.fetch(record(theirs, 0), member)
        await asyncio.sleep(16.0)
        assert {*rig.held} == {own, theirs}
        stopped = record(digest(bytes([0])), 0)
        rig.payloads.stop(stopped)
        assert rig.payloads._key(stopped) not in rig.payloads._wanted

    play(story)


def test_a_payload_that_a_set_names_leaves_the_queue_of_what_a_neighbour_brought(play):
    """Else a node that catches up waits for a flood before it has the first final set."""
    bringer, named = OTHERS[0], PeerId("named")

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.takes_s = 30.0
        brought = {PeerId(f"eve{number}"): bringer for number in range(40)} | {named: bringer}
        rig.payloads.bringer_of = brought.get
        for number, author in enumerate(brought):
            rig.payloads.fetch(record(digest(bytes([number])), 0), author)
        await asyncio.sleep(1.0)
        wanted = record(digest(bytes([40])), 0)
        rig.shelf.holding = {OTHERS[1]: {wanted.payload}}
        rig.payloads.fetch(wanted, named)
        await asyncio.sleep(1.0)
        assert rig.shelf.at_work == 1, "it is brought still"
        del brought[named]
        for _ in range(3):
            rig.payloads.fetch(wanted, named)
        await asyncio.sleep(1.0)
        assert rig.shelf.at_work == 2
        await asyncio.sleep(62.0)
        assert rig.held == [wanted.payload]
        asked = len(rig.shelf.asked)
        for number in range(40):
            rig.payloads.stop(record(digest(bytes([number])), 0))
        await asyncio.sleep(99.0)
        assert len(rig.shelf.asked) == asked, "what is wanted no more is not fetched in its turn"
        assert not rig.payloads._queued

    play(story)


@pytest.mark.parametrize("liars", [1, 2])
def test_an_author_with_work_in_all_open_rounds_that_nobody_gives_keeps_nobody_waiting(play, liars: int):
    """It offers each payload and then sends nothing: 20 s for each attempt, and 1,024 rounds may be open."""
    honest, took_s = OTHERS[-1], list[float]()

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        plain, clock = rig.shelf.fetch_blob, asyncio.get_running_loop().time

        async def stall(blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
            await asyncio.sleep(0.0 if honest in holders[:1] else 20.0)
            return await plain(blob, holders, max_bytes)

        rig.shelf.fetch_blob, rig.shelf.holding = stall, {honest: {ONE}}
        for number in range(1024):
            for liar in OTHERS[:liars]:
                rig.payloads.fetch(record(digest(f"{liar} {number}".encode()), number), liar)
        await asyncio.sleep(1.0)
        began, here = clock(), asyncio.Event()
        rig.payloads.subscribe(lambda payload: here.set())
        rig.payloads.fetch(record(ONE, 0), honest)
        await here.wait()
        took_s.append(clock() - began)

    play(story)
    assert took_s[0] < (1.0 if liars == 1 else 21.0)


def wait_beside(play, liars: list[PeerId], stall_s: float, *, known: set[PeerId]) -> float:
    """Seconds until an honest payload is here while these give four each, slowly."""
    honest, took_s = PeerId("honest"), list[float]()

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        plain, clock = rig.shelf.fetch_blob, asyncio.get_running_loop().time

        async def stall(blob: Digest, holders: list[PeerId], max_bytes: int) -> Path:
            await asyncio.sleep(0.0 if honest in holders[:1] else stall_s)
            return await plain(blob, holders, max_bytes)

        rig.shelf.fetch_blob, rig.shelf.holding = stall, {honest: {ONE}}
        rig.shelf.connected, rig.payloads.is_known = [honest, *liars], known.__contains__
        for number in range(4):
            for liar in liars:
                rig.payloads.fetch(record(digest(f"{liar} {number}".encode()), number), liar)
        await asyncio.sleep(1.5 * stall_s)
        began, here = clock(), asyncio.Event()
        rig.payloads.subscribe(lambda payload: payload == ONE and here.set())
        rig.payloads.fetch(record(ONE, 0), honest)
        await here.wait()
        took_s.append(clock() - began)

    play(story)
    return took_s[0]


LIARS = [PeerId(f"liar{number}") for number in range(30)]


def test_strangers_that_give_slowly_keep_no_member_waiting(play):
    assert wait_beside(play, LIARS, 120.0, known={PeerId("honest")}) < 1.0


def test_a_stranger_waits_for_one_turn_of_each_other_and_not_for_all_that_they_offer(play):
    """Its first attempts are short, so it is not long. Each liar offers four payloads."""
    seconds = FIRST_S * len(LIARS) / OF_STRANGERS
    assert wait_beside(play, LIARS, 120.0, known=set()) < seconds


def test_a_member_waits_for_one_turn_of_each_other_member(play):
    assert wait_beside(play, LIARS, 20.0, known={*LIARS, PeerId("honest")}) < 20.0 * len(LIARS) / PARALLEL


def test_a_pushed_payload_waits_for_no_download(play):
    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.takes_s, rig.payloads.is_known = 15.0, lambda author: False
        for number in range(40):
            rig.payloads.fetch(record(digest(bytes([number])), 0), PeerId(f"eve{number}"))
        await asyncio.sleep(1.0)

        async def pushed(blob: Digest, max_bytes: int) -> Path:
            rig.shelf.here.add(blob)
            return rig.shelf.blob_path(blob)

        rig.payloads.pushed = pushed
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(1.0)
        assert rig.held == [ONE]

    play(story)


def test_a_slow_stranger_has_longer_with_each_try(play):
    """So its payload comes, too: what an attempt got is kept, but the worker may need long for it."""

    async def story(rig: Rig, group: asyncio.TaskGroup) -> None:
        rig.shelf.takes_s, rig.shelf.holding = 90.0, {AUTHOR: {ONE}}
        rig.payloads.is_known = lambda author: False
        rig.payloads.fetch(record(ONE, 0), AUTHOR)
        await asyncio.sleep(300.0)

    assert play(story).held == [ONE]
