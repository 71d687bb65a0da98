"""DownloadTurns of downloads: who begins next, who never holds all places, and what a cancelled wait leaves."""

import asyncio

from atoll.p2p.blobs.turns import MOST_REMEMBERED, RECENT_S, STALL_S, DownloadTurns, Line
from atoll.p2p.transports.memory.virtual_time import run_virtual


def line(name, *, most=4):
    return Line(name, is_stranger=name.startswith("new"), most=most)


class Queue:
    """Downloads of a second each, in the order in which they began."""

    def __init__(self, places=4, strangers=2):
        self.turns = DownloadTurns(places=places, strangers=strangers)
        self.began, self.at_work, self.most_strangers = [], [], 0

    async def download(self, one):
        async with self.turns.turn(one):
            self.began.append(one.name)
            self.at_work.append(one)
            self.most_strangers = max(self.most_strangers, sum(each.is_stranger for each in self.at_work))
            await asyncio.sleep(1.0)
            self.at_work.remove(one)

    def play(self, *lines):
        async def main():
            await asyncio.gather(*map(self.download, lines))

        run_virtual(main())
        assert not self.turns._waiting
        assert self.turns._at_work.total() == 0
        return self.began


def test_one_place_is_for_strangers_and_all_others_for_members_first():
    began = Queue().play(*[line("old", most=9)] * 4, *[line("new")] * 4, *[line("old", most=9)] * 8)
    assert began[:4] == ["old"] * 4
    assert sorted(began[4:8]) == ["new", "old", "old", "old"]


def test_strangers_never_hold_more_than_their_places_though_others_are_free():
    queue = Queue()
    queue.play(*(line(f"new{number}") for number in range(12)))
    assert queue.most_strangers == 2


def test_the_line_whose_turn_is_longest_ago_is_next():
    began = Queue(places=1).play(*[line("a")] * 3, *[line("b")] * 2, line("c"))
    assert began == ["a", "b", "c", "a", "b", "a"]


def test_a_line_holds_no_more_than_its_own_places():
    began = Queue(places=4).play(*[line("a", most=2)] * 5, line("b"), line("c"))
    assert began[:4] == ["a", "a", "b", "c"]


def test_a_cancelled_wait_and_a_cancelled_download_give_their_places_back():
    queue = Queue(places=1)

    async def main():
        async with asyncio.TaskGroup() as group:
            first, second, _ = (group.create_task(queue.download(line(name))) for name in "abc")
            await asyncio.sleep(0.5)
            second.cancel()
            first.cancel()

    run_virtual(main())
    assert queue.began == ["a", "c"]
    assert not queue.turns._waiting
    assert queue.turns._at_work.total() == 0


def test_a_place_that_is_given_to_a_wait_that_ends_at_once_is_not_lost():
    queue = Queue(places=1)

    async def main():
        async with asyncio.TaskGroup() as group:
            first, second = (group.create_task(queue.download(line(name))) for name in "ab")
            await asyncio.sleep(0.5)
            first.cancel()
            asyncio.get_running_loop().call_soon(second.cancel)
        await asyncio.wait_for(queue.download(line("c")), 5.0)

    run_virtual(main())
    assert queue.began[-1] == "c"


def test_few_lines_are_remembered():
    queue = Queue(places=400)
    queue.play(*(line(f"a{number}") for number in range(2 * MOST_REMEMBERED)))
    assert len(queue.turns._served) == MOST_REMEMBERED


class Stalls(Queue):
    """Downloads of `bad` lines hold their places for STALL_S and bring nothing."""

    async def download(self, one):
        if not one.name.startswith("bad"):
            return await super().download(one)
        try:
            async with self.turns.turn(one):
                self.began.append(one.name)
                await asyncio.sleep(STALL_S)
                raise TimeoutError
        except TimeoutError:
            pass


def test_a_member_that_stalled_comes_after_those_that_did_not_for_a_while():
    queue = Stalls(places=1)

    async def main():
        await queue.download(line("bad"))
        await queue.download(line("a"))
        await asyncio.gather(*map(queue.download, [line("b"), line("bad"), line("a")]))
        assert queue.began[-3:] == ["b", "a", "bad"], "though its turn was longest ago"
        await queue.download(line("b"))
        await asyncio.sleep(RECENT_S)
        await asyncio.gather(*map(queue.download, [line("c"), line("b"), line("bad")]))
        assert queue.began[-3:] == ["c", "bad", "b"], "it is forgotten"

    run_virtual(main())


def test_members_that_stall_leave_a_place_to_those_that_do_not():
    """Thirty of them held all places in turn, each for two minutes."""
    queue = Stalls(places=4)

    async def main():
        bad = [line(f"bad{number}") for number in range(30)]
        await asyncio.gather(*map(queue.download, bad))
        async with asyncio.TaskGroup() as group:
            stalling = [group.create_task(queue.download(one)) for one in bad]
            await asyncio.sleep(1)
            async with asyncio.timeout(3):
                for _ in range(2):
                    await queue.download(line("a"))
            for task in stalling:
                task.cancel()
        assert len(queue.turns._stalled) == 30

    run_virtual(main())


def test_few_stalls_are_remembered():
    queue = Stalls(places=400)

    async def main():
        await asyncio.gather(*(queue.download(line(f"bad{number}")) for number in range(2 * MOST_REMEMBERED)))

    run_virtual(main())
    assert len(queue.turns._stalled) == MOST_REMEMBERED
