"""The DHT process: hivemind's DHTNode, isolated because it decodes peer bytes unsafely.

    python -m atoll.p2p.discovery.dht_child '{"control_socket": "…"}'

It ends when its stdin ends or p2pd no longer answers; the daemon then restarts it. It has no private key: the
daemon signs the records.
"""

import asyncio
import contextlib
import heapq
import os
import sys
import time
from typing import Any

import msgspec
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, PeerID
from hivemind.utils import timed_storage
from hivemind.utils.multiaddr import Multiaddr

from atoll.p2p.discovery import dht_pipe, dht_records
from atoll.p2p.host.framing import PREFIX_BYTES, frame_size, framed
from atoll.protocols.errors import PeerFault

_KEYS_KEPT = 4096
_WATCH_S = 5.0
_JOIN_S = 20.0
_ASKS_AT_ONCE = 16


class Validator(RecordValidatorBase):  # type: ignore[misc]
    """Accepts only records of our format, under their author's name, with the expiry that the author signed."""

    def __init__(self) -> None:
        self.node: DHTNode | None = None

    def validate(self, record: DHTRecord) -> bool:
        """Whether a record from a peer is legal. Raises nothing."""
        try:
            subkey = _plain(record.subkey, str, 64)
            ours = dht_records.decode_record(
                _plain(record.value, bytes, dht_records.RECORD_MAX_BYTES + 8), time.time()
            )
        except (PeerFault, msgspec.MsgspecError, UnicodeError):
            return False
        key_id = DHTID.generate(source=ours.key)
        is_in_place = subkey == ours.author and record.key == key_id.to_bytes()
        return is_in_place and record.expiration_time == ours.expires_s and self._has_room(key_id, subkey)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Always False: validators are not merged."""
        return False

    def _has_room(self, key_id: DHTID, subkey: str) -> bool:
        kept = self.node.protocol.storage.get(key_id) if self.node else None
        if kept is None or not isinstance(kept.value, DictionaryDHTValue):
            return True
        return subkey in kept.value.data or len(kept.value.data) < dht_records.RECORDS_PER_KEY


def store_fixed(self: Any, key: Any, value: Any, expiration_time: float) -> bool:
    """Replace TimedStorage.store: refuse an older value before it touches the heap, and bound the expiry.

    hivemind's own method pushes the refused value's expiry and then deletes the newer value at that time.
    """
    now = timed_storage.get_dht_time()
    if not now <= expiration_time <= now + dht_records.MAX_TTL_S + dht_records.CLOCK_SKEW_S and not self.frozen:
        return False
    if key in self.data and self.data[key].expiration_time >= expiration_time:
        return False
    entry = self.key_to_heap[key] = timed_storage.HeapEntry(expiration_time, key)
    heapq.heappush(self.expiration_heap, entry)
    self.data[key] = timed_storage.ValueWithExpiration(value, expiration_time)
    self._remove_outdated()
    return True


class Child:
    """One DHTNode, and the pipe to the daemon."""

    def __init__(self, options: dht_pipe.ChildOptions, out: int) -> None:
        self._options = options
        self._out = out
        self._slots = asyncio.Semaphore(_ASKS_AT_ONCE)

    async def run(self) -> None:
        """Serve requests until stdin ends or p2pd is gone."""
        p2p = await self._open_p2p()
        validator = Validator()
        try:
            node = validator.node = await DHTNode.create(
                p2p=p2p, record_validator=validator, cache_size=_KEYS_KEPT, cache_nearest=0
            )
            node.protocol.storage.maxsize = _KEYS_KEPT
            self._send(dht_pipe.DhtReady(tuple(map(str, await p2p.get_visible_maddrs()))))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._watch(p2p)), group.create_task(self._join_often(p2p, node))]
                await self._serve(node, group)
                for task in tasks:
                    task.cancel()
        finally:
            await p2p.shutdown()

    async def _open_p2p(self) -> P2P:
        if self._options.folder:
            P2P._UNIX_SOCKET_PREFIX = f"/unix{self._options.folder}/"
        if self._options.control_socket:
            return await P2P.replicate(Multiaddr(f"/unix{self._options.control_socket}"))
        return await P2P.create(host_maddrs=list(self._options.listen), nat_port_map=False, auto_nat=False)

    async def _serve(self, node: DHTNode, group: asyncio.TaskGroup) -> None:
        reader = asyncio.StreamReader(limit=dht_pipe.FRAME_MAX_BYTES)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        with contextlib.closing(transport), contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = frame_size(await reader.readexactly(PREFIX_BYTES), dht_pipe.FRAME_MAX_BYTES)
                ask: dht_pipe.Store | dht_pipe.Find = msgspec.msgpack.decode(
                    await reader.readexactly(size), type=dht_pipe.Ask
                )
                await self._slots.acquire()
                group.create_task(self._answer(node, ask)).add_done_callback(lambda _: self._slots.release())

    async def _answer(self, node: DHTNode, ask: dht_pipe.Store | dht_pipe.Find) -> None:
        if isinstance(ask, dht_pipe.Store):
            self._send(dht_pipe.Stored(ask.id, await _store(node, ask.record)))
        else:
            self._send(dht_pipe.Found(ask.id, await _find(node, ask.key)))

    async def _watch(self, p2p: P2P) -> None:
        """End the process when p2pd does not answer: hivemind itself would hang."""
        while True:
            await asyncio.sleep(_WATCH_S)
            async with asyncio.timeout(_WATCH_S):
                await p2p._client.identify()

    async def _join_often(self, p2p: P2P, node: DHTNode) -> None:
        """Dial the bootstrap peers, and give DHTNode every peer that p2pd is connected to."""
        pause_s = 1.0
        while True:
            for seed in self._options.bootstrap:
                maddr, _, peer = seed.rpartition("/p2p/")
                with contextlib.suppress(Exception):
                    async with asyncio.timeout(_JOIN_S):
                        await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(maddr)])
            peers = [info.peer_id for info in await p2p.list_peers()]
            await asyncio.gather(*(node.protocol.call_ping(peer, validate=False, strict=False) for peer in peers))
            pause_s = min(60.0, pause_s * 2) if peers else 1.0
            await asyncio.sleep(pause_s)

    def _send(self, answer: dht_pipe.Answer) -> None:
        view = memoryview(framed(msgspec.msgpack.encode(answer)))
        while view:
            view = view[os.write(self._out, view) :]


async def _store(node: DHTNode, data: bytes) -> bool:
    record: dht_records.DhtRecord = dht_records.decode_record(data, time.time())
    kept = await node.store(record.key, data, expiration_time=record.expires_s, subkey=str(record.author))
    return bool(kept)


async def _find(node: DHTNode, key: bytes) -> tuple[bytes, ...]:
    found = await node.get(key, latest=True)
    if found is None or not isinstance(found.value, dict):
        return ()
    values = [item.value for item in found.value.values()]
    return tuple(value for value in values if isinstance(value, bytes))[: dht_records.RECORDS_PER_KEY]


def _plain(data: bytes, kind: type[Any], max_bytes: int) -> Any:
    """Decode a msgpack string or binary, never a nested value. Raises msgspec.MsgspecError."""
    if len(data) > max_bytes:
        raise msgspec.DecodeError("too long")
    return msgspec.msgpack.decode(data, type=kind, strict=True)


def main() -> None:
    """Entry point of the DHT process; its options are one JSON argument."""
    options = msgspec.json.decode(sys.argv[1], type=dht_pipe.ChildOptions)
    # Libraries print; stdout carries frames only.
    out = os.dup(1)
    os.dup2(2, 1)
    timed_storage.TimedStorage.store = store_fixed
    asyncio.run(Child(options, out).run())


if __name__ == "__main__":
    main()
