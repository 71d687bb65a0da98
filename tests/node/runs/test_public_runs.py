"""Names of public runs, and the one run that a name means, with a DHT that the test fills in."""

import asyncio
import random
import time

import pytest
from msgspec.structs import replace

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.runs import public_runs
from atoll.node.runs.invites import invite_text, store_invite
from atoll.node.runs.presets import preset
from atoll.node.runs.public_runs import (
    FIND_S,
    SHOWN_MAX,
    WantedRun,
    client_of,
    find_joinable,
    matching,
    parse_wanted,
)
from atoll.node.runs.run_files import parse_run, store_run
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import PublicRun
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.swarm.run_fetch import SEED_S, serve_run
from atoll.p2p.transports.memory.memory_network import MemoryNetwork
from atoll.p2p.transports.memory.virtual_time import run_virtual
from atoll.protocols.errors import AtollError, ConfigError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId, RunId
from atoll.protocols.run.run_spec import sign_run

OWNER, OTHER, ME = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


def run(name: str = "common", owner: Identity = OWNER, size: str = "tiny", age_s: float = 60.0) -> PublicRun:
    spec = replace(preset(size, owner.peer_id, 1, "synthetic:markov"), name=name)
    return PublicRun(spec, sign_run(spec, owner), age_s)


def by_id(*runs: PublicRun) -> dict[RunId, PublicRun]:
    return {one.spec.id: one for one in runs}


class GivenDht(Dht):
    """A DHT whose answers are given; each takes a second."""

    def __init__(self, listed: dict[RunId, PublicRun], members: dict[RunId, list[PeerAddress]]) -> None:
        super().__init__(MemoryNetwork(seed=2).host(ME.peer_id), ME, (), rng=random.Random(1))
        self.listed, self.members = listed, members

    async def meet(self) -> bool:
        await asyncio.sleep(1.0)
        return True

    async def runs(self) -> dict[RunId, PublicRun]:
        await asyncio.sleep(1.0)
        return self.listed

    async def find(self, run: RunId) -> list[PeerAddress]:
        await asyncio.sleep(1.0)
        return self.members.get(run, [])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"my run@{OWNER.peer_id}", WantedRun(name="my run", owner=OWNER.peer_id)),
        (f"a@b@{OWNER.peer_id}", WantedRun(name="a@b", owner=OWNER.peer_id)),
        ("ABCDEF01", WantedRun(id_start="abcdef01")),
        ("0" * 64, WantedRun(id_start="0" * 64)),
        ("abcdef0", None),
        ("0" * 65, None),
        ("tiny", None),
        ("", None),
    ],
)
def test_what_users_call_a_run(text, wanted):
    assert parse_wanted(text) == wanted


@pytest.mark.parametrize("owner", ["", OWNER.peer_id[-8:], OWNER.peer_id[:-1], "nobody"])
def test_an_owner_is_a_whole_peer_id(owner):
    """A tail of one is easily made by somebody else."""
    with pytest.raises(ConfigError, match="is no PeerID"):
        parse_wanted(f"tiny@{owner}")


def test_words_find_runs_by_name_preset_owner_and_id():
    small, large = run("Book club", age_s=90), run("library", OTHER, "10m", age_s=30)
    both = by_id(small, large)
    assert matching([], both) == [large, small], "the newest first"
    assert matching(["book"], both) == [small]
    assert matching(["10M", "libr"], both) == [large]
    assert matching([OTHER.peer_id], both) == [large]
    assert matching([small.spec.id.hex()[:12]], both) == [small]
    assert matching(["book", "10m"], both) == []
    assert len(matching([], by_id(*(run(str(n)) for n in range(SHOWN_MAX + 5))))) == SHOWN_MAX


def joined(
    text: str, listed: dict[RunId, PublicRun], members: dict[RunId, list[PeerId]], serving: PublicRun | None = None
) -> tuple[public_runs.JoinableRun | AtollError, float]:
    """What `find_joinable` returns or raises, and the seconds that it took. OTHER serves the run `serving`."""

    async def main() -> tuple[public_runs.JoinableRun | AtollError, float]:
        network = MemoryNetwork(seed=1)
        wanted = parse_wanted(text)
        assert wanted is not None
        result: public_runs.JoinableRun | AtollError
        async with asyncio.TaskGroup() as group:
            other, mine = network.host(OTHER.peer_id), network.host(ME.peer_id)
            serving_tasks = [group.create_task(host.serve(lambda: None)) for host in (other, mine)]
            await asyncio.sleep(0.1)
            if serving is not None:
                serve_run(other, serving.run_file)
            places = await other.addresses()
            named = {one: [PeerAddress(peer, places) for peer in peers] for one, peers in members.items()}
            began = asyncio.get_running_loop().time()
            try:
                result = await find_joinable(GivenDht(listed, named), mine, wanted)
            except AtollError as error:
                result = error
            took_s = asyncio.get_running_loop().time() - began
            for task in serving_tasks:
                task.cancel()
        return result, took_s

    return run_virtual(main())


def test_a_run_is_found_by_its_name_and_owner_only():
    wanted, namesake = run(), run(owner=OTHER)
    found, took_s = joined(
        f"common@{OWNER.peer_id}",
        by_id(wanted, namesake),
        {wanted.spec.id: [OTHER.peer_id], namesake.spec.id: [OTHER.peer_id]},
        wanted,
    )
    assert isinstance(found, tuple)
    assert found[0] == wanted.run_file
    assert [member.peer for member in found[1]] == [OTHER.peer_id]
    assert took_s < 10


def test_several_runs_of_one_name_and_owner_are_listed_and_none_is_taken():
    first, second = run(), run(size="10m")
    members = {one.spec.id: [OTHER.peer_id] for one in (first, second)}
    error, _ = joined(f"common@{OWNER.peer_id}", by_id(first, second), members, first)
    assert isinstance(error, ConfigError)
    assert "means 2 public runs: " in error.line()
    assert first.spec.id.hex() in error.line()
    assert second.spec.id.hex() in error.line()
    assert "give the whole id of one" in error.line()


def test_a_run_that_is_not_listed_is_found_by_its_whole_id_and_fetched_from_a_member():
    wanted = run()
    found, _ = joined(wanted.spec.id.hex(), {}, {wanted.spec.id: [OTHER.peer_id]}, wanted)
    assert isinstance(found, tuple)
    assert found[0] == wanted.run_file
    error, _ = joined(wanted.spec.id.hex()[:12], {}, {wanted.spec.id: [OTHER.peer_id]}, wanted)
    assert isinstance(error, Unreachable)
    assert "is not in the DHT" in error.line()


def test_members_that_give_another_run_are_not_believed():
    wanted = run()
    error, took_s = joined(wanted.spec.id.hex(), {}, {wanted.spec.id: [OTHER.peer_id]}, run("another"))
    assert isinstance(error, Unreachable)
    assert "was not fetched: no seed gave the run" in error.line()
    assert took_s < 2 * FIND_S


def test_a_listed_run_is_taken_though_no_member_answers_yet():
    """All members may be behind routers: the plan is made, and the node goes on looking for them."""
    wanted = run()
    found, took_s = joined(wanted.spec.id.hex()[:8], by_id(wanted), {wanted.spec.id: [PeerId("x")]})
    assert isinstance(found, tuple)
    assert took_s <= SEED_S + 10


def test_two_hundred_false_members_cost_bounded_time():
    wanted = run()
    people = [Identity(n.to_bytes(32, "big")).peer_id for n in range(1, 200)]
    found, took_s = joined(wanted.spec.id.hex(), {}, {wanted.spec.id: [*people, OTHER.peer_id]}, wanted)
    assert isinstance(found, tuple)
    assert took_s < SEED_S + 5


def test_a_run_without_members_is_looked_for_and_then_given_up():
    wanted = run()
    error, took_s = joined(wanted.spec.id.hex(), by_id(wanted), {})
    assert isinstance(error, Unreachable)
    assert "has no member in the DHT" in error.line()
    assert error.exit_code == 75
    assert FIND_S < took_s < 2 * FIND_S


def test_without_a_server_that_answers_the_search_ends():
    class Alone(GivenDht):
        async def meet(self) -> bool:
            return False

    with pytest.raises(Unreachable, match="no DHT server answered in 30 s") as caught:
        run_virtual(public_runs.public_runs(Alone({}, {})))
    assert "--dht-bootstrap" in caught.value.hint


SEED = f"/ip4/203.0.113.7/tcp/4001/p2p/{OTHER.peer_id}"


def test_seeds_of_the_user_and_of_invites_are_bootstrap_peers_too(tmp_path):
    home = Home(tmp_path / "home")
    home.make()
    known = parse_run(home, run().run_file)
    store_run(home, known)
    invited = SEED.replace("203", "198")
    store_invite(home, known.spec.id, invite_text(known.spec, OWNER, [invited], time.time()))
    given = SEED.replace("4001", "4002")
    config = load_config(
        home.config_toml, {"dht_bootstrap": [given], "seeds": [SEED, "/dnsaddr/seed.example.org"]}
    )
    host = MemoryNetwork(seed=1).host(ME.peer_id)
    assert client_of(home, config, host, ME).bootstrap == list(map(parse_seed, (given, SEED, invited)))
    with pytest.raises(ConfigError, match="relay_only cannot look for runs in the DHT"):
        client_of(home, replace(config, relay_only=True, dht_bootstrap=()), host, ME)
    with pytest.raises(ConfigError, match="no peer is known that serves the DHT") as caught:
        client_of(Home(tmp_path / "none"), NodeConfig(), host, ME)
    assert "--dht-bootstrap" in caught.value.hint
