"""DHT records are pure; the supervisor is tested with two real children, one on our own p2pd."""

import asyncio
import os
import random
import signal
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.p2p.discovery import dht_records as records
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_pipe import ChildOptions
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols import codec
from atoll.protocols.errors import DecodeError, PeerFault, SignatureFault, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import RunId, digest
from atoll.protocols.ledger.registers import Addresses
from tests.waiting import HANGS_S, eventually

RUN = RunId(digest(b"a run"))
ME, OTHER = Identity(b"\1" * 32), Identity(b"\2" * 32)
NOW = 1_700_000_000.0
ADDRESSES = codec.encode(Addresses(("/ip4/203.0.113.7/tcp/4001", "nonsense")))


def test_a_record_round_trips() -> None:
    data = records.sign_record(ME, records.run_key(RUN), ADDRESSES, int(NOW) + 60)
    record = records.decode_record(data, NOW)
    assert (record.author, record.value, record.expires_s) == (ME.peer_id, ADDRESSES, int(NOW) + 60)
    (found,) = records.read_addresses([data, b"junk"], RUN, NOW)
    assert found.peer == ME.peer_id
    assert found.maddrs == ("/ip4/203.0.113.7/tcp/4001",), "an address that cannot be dialled is left out"
    assert records.read_addresses([data], RunId(digest(b"another")), NOW) == []


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) + 5000), DecodeError),
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) - 5000), DecodeError),
        (lambda: records.sign_record(ME, records.run_key(RUN), b"v" * 4000, int(NOW) + 60), DecodeError),
        (lambda: _forged(), SignatureFault),
        (lambda: b"\x81" * 300, DecodeError),
        (lambda: b"", DecodeError),
    ],
)
def test_an_illegal_record_is_refused(make: Callable[[], bytes], error: type[PeerFault]) -> None:
    with pytest.raises(error):
        records.decode_record(make(), NOW)


def _forged() -> bytes:
    data = records.sign_record(ME, records.run_key(RUN), b"v", int(NOW) + 60)
    record = codec.decode(data, records.DhtRecord)
    theirs = (record.version, record.key, OTHER.peer_id, record.expires_s, record.value, record.signature)
    return codec.encode(theirs)


@given(st.binary(max_size=400))
def test_any_bytes_give_a_record_or_a_peer_fault(data: bytes) -> None:
    with pytest.raises(PeerFault):
        records.decode_record(data, NOW)


@pytest.mark.network
async def test_two_children_find_each_other_and_survive_a_kill() -> None:
    """One child is attached to our p2pd, the other has its own and bootstraps from ours."""
    host = P2pdHost(ME)
    maddrs = ("/ip4/203.0.113.7/tcp/4001",)
    async with asyncio.timeout(HANGS_S), asyncio.TaskGroup() as group:
        up = asyncio.Event()
        tasks = [group.create_task(host.serve(up.set))]
        await up.wait()
        seed = f"{(await host.addresses())[0]}/p2p/{host.peer_id}"
        attached = Dht(ME, lambda: ChildOptions(control_socket=str(host.control_socket)), rng=random.Random(1))
        alone = Dht(OTHER, lambda: ChildOptions(bootstrap=(seed,)), rng=random.Random(2))
        tasks += [group.create_task(dht.serve()) for dht in (attached, alone)]
        assert attached.statistics().process_id is None, "no child before somebody needs one"
        await asyncio.gather(attached.wait_ready(), alone.wait_ready())

        await eventually(lambda: _is_known(alone, attached, maddrs))
        assert [found.peer for found in await attached.find(RUN)] == [OTHER.peer_id]
        assert (await attached.find(RUN))[0].maddrs == maddrs
        assert await attached.announce(RUN, maddrs)
        assert {found.peer for found in await alone.find(RUN)} == {ME.peer_id, OTHER.peer_id}

        victim = attached.statistics().process_id
        assert victim is not None
        asking = group.create_task(_outcome(attached))
        await asyncio.sleep(0)
        os.kill(victim, signal.SIGKILL)
        assert await asking in ("found", "unreachable"), "a death fails what waits, at once"
        await eventually(lambda: attached.statistics().restarts)
        await attached.wait_ready()
        assert attached.statistics().process_id != victim
        assert attached.statistics().restarts == 1
        for task in tasks:
            task.cancel()


async def _is_known(teller: Dht, asker: Dht, maddrs: tuple[str, ...]) -> bool:
    return await teller.announce(RUN, maddrs) and bool(await asker.find(RUN))


async def _outcome(dht: Dht) -> str:
    try:
        await dht.find(RUN)
    except Unreachable:
        return "unreachable"
    return "found"
