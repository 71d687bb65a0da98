"""A run's file from its seeds: on every transport, hostile answers refused, dead seeds named."""

import asyncio

import msgspec
import pytest

from atoll.node.runs.presets import preset
from atoll.p2p.discovery.dns import TxtRecords
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.swarm import run_fetch
from atoll.p2p.swarm.run_fetch import PROTOCOL, SEED_S, fetch_run, serve_run
from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest, peer_id_of
from atoll.protocols.run.run_spec import SPEC_VERSION, SignedRun, open_run, sign_run

OWNER = Identity(bytes(range(32)))
SPEC = preset("tiny", OWNER.peer_id, 1)
FILE = sign_run(SPEC, OWNER)
OTHER = sign_run(msgspec.structs.replace(SPEC, seed=2), OWNER)
NOBODY = peer_id_of(bytes([9]) * 32)


async def no_names(name: str) -> TxtRecords:
    raise AssertionError(f"nobody asked for {name}")


def answering(data: bytes):
    """A handler that gives `data` whatever it is asked."""

    async def answer(stream) -> None:
        await read_frame(stream, 32)
        await write_frame(stream, data)
        with pytest.raises(Unreachable):
            await stream.read_exactly(1)
        await stream.close()

    return answer


def test_a_seed_gives_its_run_and_no_other(run_lab, dial):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host(prepare=lambda host: serve_run(host, FILE))
        address = await dial(seed)
        assert await fetch_run(asker, [address], SPEC.id) == FILE
        assert await fetch_run(asker, [address, address], SPEC.id) == FILE, "again, over a live connection"
        with pytest.raises(Unreachable) as caught:
            await fetch_run(asker, [address], open_run(OTHER).id)
        assert f"{address.maddrs[0]}/p2p/{seed.peer_id}: " in caught.value.line()
        assert "does not train this run" in caught.value.line()
        assert lab.faults == []

    run_lab(scenario)


def test_one_good_seed_among_dead_and_lying_ones_is_enough(run_memory, dial):
    async def scenario(lab):
        asker, liar, silent, good = [await lab.host() for _ in range(4)]
        liar.set_handler(PROTOCOL, answering(OTHER))

        async def wait(stream) -> None:
            await asyncio.sleep(1e6)

        silent.set_handler(PROTOCOL, wait)
        serve_run(good, FILE)
        dead = PeerAddress(NOBODY, ("/ip4/10.0.0.99/tcp/1",))
        seeds = [dead, await dial(liar), await dial(silent)]
        assert await fetch_run(asker, [*seeds, await dial(good)], SPEC.id) == FILE
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable) as caught:
            await fetch_run(asker, seeds, SPEC.id)
        assert asyncio.get_running_loop().time() - began == pytest.approx(SEED_S, abs=1.0)
        line = caught.value.line()
        assert "gave another run" in line
        assert "no answer in 15 s" in line
        assert str(NOBODY) in line

    run_memory(scenario)


@pytest.mark.parametrize("data", [b"junk", FILE[:-1], FILE + b"x", bytes([FILE[0]]) + bytes(100)])
def test_garbage_is_refused(run_memory, dial, data):
    async def scenario(lab):
        asker, liar = await lab.host(), await lab.host({PROTOCOL: answering(data)})
        with pytest.raises(Unreachable, match="no seed gave the run"):
            await fetch_run(asker, [await dial(liar)], SPEC.id)

    run_memory(scenario)


def of_version(number: int) -> tuple[bytes, RunId]:
    """The run's file as a program of that version writes it, with a key that is unknown here, and its id."""
    keys = {**msgspec.msgpack.decode(codec.encode(SPEC)), "version": number, "unknown": 1}
    body = msgspec.msgpack.encode(keys, order="sorted")
    signature = msgspec.msgpack.decode(FILE, type=SignedRun).signature
    return codec.encode(SignedRun(body, signature)), RunId(digest(body))


@pytest.mark.parametrize(
    ("more", "way"), [(1, "update atoll on this node"), (-1, "join with the version that its members have")]
)
def test_a_run_of_another_version_is_refused_at_once_and_blames_no_seed(run_memory, dial, more, way):
    """An invite to one asked its seeds again and again, as if they were to blame."""
    file, run = of_version(SPEC_VERSION + more)

    async def scenario(lab):
        asker, seed, silent = await lab.host(), await lab.host({PROTOCOL: answering(file)}), await lab.host()

        async def wait(stream) -> None:
            await asyncio.sleep(1e6)

        silent.set_handler(PROTOCOL, wait)
        seeds = [await dial(silent), await dial(seed)]
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConfigError) as caught:
            await fetch_run(asker, seeds, run)
        assert asyncio.get_running_loop().time() - began < SEED_S
        told = f"this run has RunSpec version {SPEC_VERSION + more}; this node speaks {SPEC_VERSION}; {way}"
        assert caught.value.line().startswith(told)

    run_memory(scenario)


def test_a_seed_cannot_make_up_another_version_of_a_run(run_memory, dial):
    file, _ = of_version(SPEC_VERSION + 1)

    async def scenario(lab):
        asker, liar = await lab.host(), await lab.host({PROTOCOL: answering(file)})
        with pytest.raises(Unreachable, match="no seed gave the run"):
            await fetch_run(asker, [await dial(liar)], SPEC.id)

    run_memory(scenario)


def test_an_endless_answer_is_cut_before_it_is_held(run_memory, dial):
    async def flood(stream) -> None:
        await read_frame(stream, 32)
        await stream.write((1 << 30).to_bytes(4, "little"))
        await stream.write(bytes(1000))

    async def scenario(lab):
        asker, liar = await lab.host(), await lab.host({PROTOCOL: flood})
        with pytest.raises(Unreachable, match="65536 are legal"):
            await fetch_run(asker, [await dial(liar)], SPEC.id)

    run_memory(scenario)


def test_a_question_that_is_none_is_a_fault(run_memory, dial):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()
        serve_run(seed, FILE)
        await asker.connect(await dial(seed))
        for question in (b"short", bytes(33)):
            stream = await asker.open_stream(seed.peer_id, PROTOCOL)
            await write_frame(stream, question)
            with pytest.raises(Unreachable):
                await read_frame(stream, 1 << 16)
        assert len(lab.faults) == 2

    run_memory(scenario)


def test_an_asker_that_never_asks_is_hung_up(run_memory, dial):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()
        serve_run(seed, FILE)
        await asker.connect(await dial(seed))
        stream = await asker.open_stream(seed.peer_id, PROTOCOL)
        async with asyncio.timeout(run_fetch._ANSWER_S + 2):
            with pytest.raises(Unreachable):
                await stream.read_exactly(1)

    run_memory(scenario)


def test_seeds_by_name(run_memory, dial):
    async def scenario(lab):
        asker, seed = await lab.host(), await lab.host()

        async def wait(stream) -> None:
            await asyncio.sleep(1e6)

        silent = await lab.host({PROTOCOL: wait})
        serve_run(seed, FILE)
        address = await dial(seed)

        async def lookup(name: str) -> TxtRecords:
            assert name == "_dnsaddr.seed.example.org"
            dead = f"dnsaddr={(await dial(silent)).maddrs[0]}/p2p/{silent.peer_id}"
            return TxtRecords((dead.encode(), f"dnsaddr={address.maddrs[0]}/p2p/{seed.peer_id}".encode()), 60.0)

        named = PeerAddress("", ("/dnsaddr/seed.example.org",))
        began = asyncio.get_running_loop().time()
        assert await fetch_run(asker, [named], SPEC.id, lookup=lookup) == FILE
        assert asyncio.get_running_loop().time() - began < 1.0, "a silent one costs no time"

    run_memory(scenario)


def test_without_seeds(run_memory):
    async def scenario(lab):
        with pytest.raises(Unreachable, match="names no seed"):
            await fetch_run(await lab.host(), [], SPEC.id, lookup=no_names)

    run_memory(scenario)
