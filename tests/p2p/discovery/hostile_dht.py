"""A DHT server that lies, as a process: `python hostile_dht.py KIND BOOTSTRAP RUN_FILE`.

To whoever asks, a `liar` answers with legal records of members that do not exist, with false runs and with servers
that do not exist; a `bomber` with bytes that are no answer. Both try to store the same at the bootstrap peer, and
send it what is no request. Then they print the seed that leads to them.
"""

import asyncio
import random
import sys
import time
from pathlib import Path

import msgspec

from atoll.p2p.discovery import dht_records as records
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import parse_seed
from atoll.p2p.rpc.single_request import SingleRequests
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols import codec
from atoll.protocols.errors import Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Addresses
from atoll.protocols.run.run_spec import SignedRun, open_run
from atoll.protocols.wires import DHT

NOWHERE = "/ip4/192.0.2.{}/tcp/4001"
"""TEST-NET-1: nobody answers there."""
DEEP = b"\x91" * 8000
"""Lists in lists: 8000 levels."""
TUPLES = b"\xc7\xff\x40" * 2000
"""What crashes hivemind's decoder, in kind: extension types in extension types."""
BOMBS = (DEEP, TUPLES, b"\xc1" * 100_000, b"", codec.encode(((DEEP,) * 200, ())))


def record(author: Identity, key: bytes, value: bytes) -> bytes:
    return records.sign_record(author, key, value, int(time.time()) + 600)


def false_members(key: bytes) -> tuple[bytes, ...]:
    """Well-formed records of peers that do not exist."""
    people = [Identity(random.randbytes(32)) for _ in range(records.RECORDS_PER_KEY)]
    return tuple(
        record(one, key, codec.encode(Addresses((NOWHERE.format(n % 256),)))) for n, one in enumerate(people)
    )


def false_runs(me: Identity, run_file: bytes) -> tuple[bytes, ...]:
    """The listed run without its owner's signature, junk, and a record that its author did not sign."""
    signed = codec.decode(run_file, SignedRun)
    stolen = codec.encode(msgspec.structs.replace(signed, signature=bytes(64)))
    values = [codec.encode(records.Listing(file, 0)) for file in (stolen, b"junk", bytes(2000))]
    made = [record(Identity(random.randbytes(32)), records.RUNS_KEY, value) for value in (*values, DEEP[:3000])]
    forged = codec.decode(made[0], records.DhtRecord)
    return *made, codec.encode(msgspec.structs.replace(forged, author=me.peer_id))


async def main(kind: str, bootstrap: PeerAddress, run_file: bytes) -> None:
    me = Identity(kind.encode().ljust(32))
    host, up = P2pdHost(me), asyncio.Event()
    requests = SingleRequests(host, DHT.protocol(), 1 << 20)
    lies = {records.run_key(open_run(run_file).id): (), records.RUNS_KEY: false_runs(me, run_file)}
    lies = {key: made or false_members(key) for key, made in lies.items()}

    async def answer(peer: PeerId, request: bytes) -> bytes:
        if kind == "bomber":
            return random.choice(BOMBS)
        asked = codec.decode(request, records.FindRecords)
        strangers = [Identity(random.randbytes(32)).peer_id for _ in range(records.NAMED)]
        contacts = tuple(records.Contact(one, (NOWHERE.format(7),)) for one in strangers)
        return codec.encode(records.Found(lies.get(asked.key, ()), contacts))

    async with asyncio.TaskGroup() as group:
        group.create_task(host.serve(up.set))
        await up.wait()
        requests.set_handler(answer)
        await host.connect(bootstrap)
        maddrs = await host.addresses()
        for bomb in BOMBS:
            with_bomb = codec.encode(records.StoreRecord(bomb[:7000]))
            for request in (bomb[:8000], with_bomb):
                try:
                    assert not await requests.ask(bootstrap.peer, request, 1 << 20)
                except Unreachable:
                    continue
        for made in lies.values():
            for one in made[:40]:
                assert not await requests.ask(bootstrap.peer, codec.encode(records.StoreRecord(one)), 1 << 20)
        known = codec.encode(records.FindRecords(records.RUNS_KEY, maddrs))
        assert await requests.ask(bootstrap.peer, known, 1 << 20), "the bootstrap peer serves no DHT"
        print(f"{maddrs[0]}/p2p/{me.peer_id}", flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], parse_seed(sys.argv[2]), Path(sys.argv[3]).read_bytes()))
