"""Counts what whole nodes on virtual time send and receive, where the bytes come off the wire."""

import asyncio
from collections import Counter

import pytest

from atoll.p2p.exchange.sync import Exchange
from atoll.p2p.ledger.store import Ledger
from atoll.p2p.membership.register_store import RegisterStore
from atoll.p2p.membership.register_sync import RegisterBatch
from atoll.p2p.rpc.call_stream import OutgoingCalls
from atoll.p2p.rpc.server import CallServer
from atoll.p2p.transports.memory.memory_stream import MemoryStream
from atoll.protocols import codec
from atoll.protocols.wires import BLOB, REDUCTION

RECORDS = ("gossip.entry", "gossip.register")
EXCHANGES = ("ledger.sync", "registers.pull")


class Meter:
    """Counts what the members receive, where the bytes come off the wire: the gossip itself is not asked."""

    def __init__(self, patch: pytest.MonkeyPatch, members: int) -> None:
        self.members = members
        self.copies: Counter[str] = Counter()
        """Records that arrived, by the way that they came."""
        self.bytes: Counter[str] = Counter()
        """Bytes of frames by method, requests, replies and notices."""
        self.carried: Counter[str] = Counter()
        """Bytes that members wrote to streams, by protocol."""
        self.records = 0
        self.born: dict[bytes, float] = {}
        self.arrived: dict[bytes, list[float]] = {}
        self._watch_server(patch)
        self._watch_caller(patch)
        self._watch_stores(patch)
        self._watch_streams(patch)

    def clear(self) -> None:
        """Count from now on."""
        self.copies.clear()
        self.bytes.clear()
        self.carried.clear()
        self.born.clear()
        self.arrived.clear()
        self.records = 0

    def copies_of_a_record(self) -> float:
        """Mean over records, and over members that did not make it; exchanges count, too."""
        return sum(self.copies.values()) / (self.records * (self.members - 1))

    def report(self) -> dict[str, float]:
        """Figures since `clear`; bytes are those of a member, mean."""
        others = self.members - 1
        whole = sorted(max(at) - self.born[name] for name, at in self.arrived.items() if len(at) == others)
        found = {
            "records": self.records,
            "copies": self.copies_of_a_record(),
            "pushed": sum(self.copies[method] for method in RECORDS) / (self.records * others),
            "entries that all have": len(whole),
            "entries that not all have": len(self.born) - len(whole),
            "p50 s": whole[len(whole) // 2],
            "p99 s": whole[len(whole) * 99 // 100],
        }
        return found | {f"B {key}": size / self.members for key, size in sorted(self.bytes.items())}

    def split(self) -> dict[str, float]:
        """What a member sent since `clear`, in bytes, mean: payloads and rows of payloads, records, the rest."""
        payload = sum(self.carried[wire.protocol()] for wire in (BLOB, REDUCTION))
        gossiped = {name: size for name, size in self.bytes.items() if name.startswith("gossip.")}
        exchanged = sum(self.bytes[f"{name}{end}"] for name in EXCHANGES for end in ("", " reply"))
        rest = sum(self.carried.values()) - payload - sum(gossiped.values()) - exchanged
        found = {"payloads and rows": payload, **gossiped, "exchanges": exchanged, "rest": rest}
        return {name: size / self.members for name, size in sorted(found.items())}

    def _watch_server(self, patch: pytest.MonkeyPatch) -> None:
        real = CallServer._run_method

        async def run_method(server, peer, frame):
            self.bytes[frame.method] += 6 + len(frame.method) + len(frame.body)
            if frame.method in RECORDS:
                self.copies[frame.method] += 1
            elif frame.method == "ledger.sync":
                self._count_exchange(frame.body)
            return await real(server, peer, frame)

        patch.setattr(CallServer, "_run_method", run_method)

    def _watch_caller(self, patch: pytest.MonkeyPatch) -> None:
        real = OutgoingCalls.request

        async def request(link, method, body, max_bytes):
            reply = await real(link, method, body, max_bytes)
            self.bytes[f"{method} reply"] += 9 + len(reply)
            if method == "ledger.sync":
                self._count_exchange(reply)
            elif method == "registers.pull":
                self.copies[method] += len(codec.decode(reply, RegisterBatch, max_bytes=max_bytes).held)
            return reply

        patch.setattr(OutgoingCalls, "request", request)

    def _count_exchange(self, body) -> None:
        self.copies["ledger.sync"] += len(codec.decode(body, Exchange, max_bytes=1 << 20).entries)

    def _watch_stores(self, patch: pytest.MonkeyPatch) -> None:
        append, insert_all, publish = Ledger.append, Ledger.insert_all, RegisterStore.publish
        now = lambda: asyncio.get_running_loop().time()  # noqa: E731

        def watched_append(ledger, identity, body):
            entry = append(ledger, identity, body)
            self.records += 1
            self.born[entry.id] = now()
            self.arrived[entry.id] = []
            return entry

        def watched_insert(ledger, entries, sender):
            done = insert_all(ledger, entries, sender)
            for entry in done.fresh:
                if entry.id in self.arrived:
                    self.arrived[entry.id].append(now())
            return done

        def watched_publish(store, value, ttl_s, at):
            self.records += 1
            return publish(store, value, ttl_s, at)

        patch.setattr(Ledger, "append", watched_append)
        patch.setattr(Ledger, "insert_all", watched_insert)
        patch.setattr(RegisterStore, "publish", watched_publish)

    def _watch_streams(self, patch: pytest.MonkeyPatch) -> None:
        real = MemoryStream._post

        def post(stream, part):
            self.carried[stream.protocol] += len(part)
            real(stream, part)

        patch.setattr(MemoryStream, "_post", post)
