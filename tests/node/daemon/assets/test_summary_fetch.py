"""Who is asked for a certified summary, and for how long: one honest peer among many that withhold is enough."""

import asyncio
from types import SimpleNamespace

import pytest

from atoll.node.daemon.assets import summary_fetch
from atoll.node.daemon.assets.summary_fetch import AT_ONCE, NEWER_S, PACED_S, SummaryFetcher
from atoll.p2p.swarm.anti_entropy import ANSWER_S
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import PeerId

HONEST = PeerId("honest")
NAMES = tuple(f"record {number}" for number in range(4))


class Peers:
    """Each peer's name says what it does; a link here is the round of the summary that it leads to."""

    def __init__(self, *peers):
        self.peers, self.asked, self.stored, self.faults = [*map(PeerId, peers)], [], [], []
        self.at_once = self.most = self.on_line = 0

    async def link(self, peer, number, heard):
        self.asked.append(peer)
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        try:
            await asyncio.sleep(1e9 if peer.startswith("silent") else 1.0 if peer.startswith("slow") else 0.1)
        finally:
            self.at_once -= 1
        if number or peer.startswith("empty"):
            return None
        return 64 if peer.startswith("old") else 128

    async def summary(self, peer, name, heard):
        if peer.startswith(("trickle", "thin")):
            for _ in range(40 if peer.startswith("trickle") else 8):
                await asyncio.sleep(ANSWER_S - 1 if peer.startswith("trickle") else 5.0)
                heard(10)
        if peer.startswith("shared"):
            await self._over_a_line()
        await asyncio.sleep(1e9 if peer.startswith("half") else 0.1)
        heard(0)
        return b""

    async def _over_a_line(self):
        """A part of a summary, for which the line would take 8 s, if it were for this one alone."""
        self.on_line += 1
        try:
            left_s = 8.0
            while left_s > 0:
                await asyncio.sleep(0.25)
                left_s -= 0.25 / self.on_line
        finally:
            self.on_line -= 1

    async def records(self, peer, names, found, heard):
        if peer.startswith("junk"):
            raise DecodeError("junk")
        await asyncio.sleep(1e9 if peer.startswith("keeps") else 0.1)
        heard()
        here = [] if peer.startswith("holds") else NAMES[:2] if peer.startswith("part") else NAMES
        found |= {name: SimpleNamespace(author="author") for name in names if name in here}

    def fetcher(self, monkeypatch, rank=lambda peer: 0):
        floor = SimpleNamespace(author="author", records=NAMES[:-1], entry=NAMES[-1])
        monkeypatch.setattr(summary_fetch, "owner_of", lambda spec: None)
        monkeypatch.setattr(summary_fetch, "check_link", lambda spec, link, _: SimpleNamespace(name=link))
        monkeypatch.setattr(
            summary_fetch,
            "check_summary",
            lambda spec, certified, _: SimpleNamespace(
                summary=SimpleNamespace(round=certified.name, forks=()), floors=(floor,), places={}
            ),
        )
        monkeypatch.setattr(summary_fetch, "after", lambda full: None)
        monkeypatch.setattr(summary_fetch, "Cut", lambda summary, round_, *more: round_)
        monkeypatch.setattr(
            summary_fetch, "StoredLink", lambda link, name, data: SimpleNamespace(link=link, summary=data)
        )
        ledger = SimpleNamespace(cut=lambda cut, entries: self.stored.append((cut, len(entries))))
        blame = lambda peer, fault: self.faults.append(peer)  # noqa: E731
        return SummaryFetcher(None, ledger, self, lambda: self.peers, lambda: -1, blame, rank)

    def brings(self, fetcher):
        """The round that it brings, and after how many seconds."""

        async def main():
            began = asyncio.get_running_loop().time()
            return await fetcher.bring(), asyncio.get_running_loop().time() - began

        return run_virtual(main())


@pytest.mark.parametrize("kind", ["silent", "half"])
@pytest.mark.parametrize("count", [1, 16, 60])
def test_silent_neighbours_cost_seconds_and_are_the_last_from_then_on(count, kind, monkeypatch):
    peers = Peers(*(f"{kind} {number}" for number in range(count)), HONEST)
    fetcher = peers.fetcher(monkeypatch)
    round_, took_s = peers.brings(fetcher)
    assert (round_, peers.stored) == (128, [(128, 4)])
    assert took_s <= (count // AT_ONCE + 1) * (ANSWER_S + 0.1) + NEWER_S + 1
    assert peers.most <= AT_ONCE
    peers.asked.clear()
    assert peers.brings(fetcher)[1] <= NEWER_S + 1
    assert HONEST in peers.asked[:AT_ONCE]


@pytest.mark.parametrize(("count", "most_s"), [(16, 22.0), (60, 80.0)])
def test_neighbours_that_trickle_give_their_places_to_those_that_wait(count, most_s, monkeypatch):
    peers = Peers(*(f"trickle {number}" for number in range(count)), HONEST)
    round_, took_s = peers.brings(peers.fetcher(monkeypatch, lambda peer: 1))
    assert round_ == 128
    assert took_s <= most_s + NEWER_S + PACED_S * AT_ONCE


def test_a_slow_chain_ends_for_nobody_else_and_has_twice_as_long_each_time(monkeypatch):
    """Where the newcomer's own line is slow all chains are: 40 s each."""
    alone = Peers(*(f"thin {number}" for number in range(AT_ONCE)))
    assert alone.brings(alone.fetcher(monkeypatch, lambda peer: 1)) == (128, pytest.approx(40.0, abs=2.0))
    many = Peers(*(f"thin {number}" for number in range(3 * AT_ONCE)))
    fetcher = many.fetcher(monkeypatch, lambda peer: 1)
    found = [many.brings(fetcher) for _ in range(2)]
    assert found[-1][0] == 128
    assert sum(took_s for _, took_s in found) < 130.0
    members = Peers(*(f"thin {number}" for number in range(3 * AT_ONCE)))
    assert members.brings(members.fetcher(monkeypatch)) == (128, pytest.approx(45.0, abs=2.0))


@pytest.mark.parametrize(("count", "most_tries"), [(2, 2), (AT_ONCE, 4), (3 * AT_ONCE, 4)])
def test_over_a_slow_line_that_all_chains_share_one_comes_whole_in_the_end(count, most_tries, monkeypatch):
    """Those that failed are asked with half as many others each time, and at last alone; who is new is not."""
    peers = Peers(*(f"shared {number}" for number in range(count)))
    fetcher = peers.fetcher(monkeypatch)
    tries = [peers.brings(fetcher)[0] for _ in range(most_tries)]
    assert tries[-1] == 128
    peers.peers = [PeerId(f"silent {number}") for number in range(2 * AT_ONCE)] + peers.peers
    peers.most = 0
    peers.brings(fetcher)
    assert peers.most == AT_ONCE


def test_members_are_asked_first(monkeypatch):
    peers = Peers(*(f"silent {number}" for number in range(60)), HONEST)
    assert peers.brings(peers.fetcher(monkeypatch, lambda peer: int(peer != HONEST)))[1] <= NEWER_S + 1
    assert peers.asked[0] == HONEST


def test_records_come_from_anybody_and_the_next_summary_is_taken_where_they_do_not(monkeypatch):
    for liar in ("keeps all back", "holds nothing", "junk", "part of them"):
        peers = Peers(liar, "empty one that has records")
        round_, took_s = peers.brings(peers.fetcher(monkeypatch))
        assert (round_, peers.stored) == (128, [(128, 4)])
        assert took_s <= ANSWER_S + 1
        assert peers.faults == ([liar] if liar == "junk" else [])
    peers = Peers("keeps all back", "holds nothing")
    assert peers.brings(peers.fetcher(monkeypatch))[0] is None
    assert not peers.stored


def test_the_newest_of_what_is_proven_soon_is_taken(monkeypatch):
    peers = Peers("old", "silent", "slow")
    round_, took_s = peers.brings(peers.fetcher(monkeypatch))
    assert round_ == 128
    assert took_s <= NEWER_S + 1
