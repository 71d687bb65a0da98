"""The records that a node keeps for the DHT, bounded in number and bytes. Pure; time is an argument.

A record is accepted from its author alone, so each false member under a run's key costs a connection of its own.
A full key refuses newcomers: members that are there, and announce themselves again, cannot be crowded out.
"""

from atoll.p2p.discovery import dht_records
from atoll.protocols.errors import PeerFault
from atoll.protocols.ids import PeerId

STORED_BYTES = 8 << 20
RECORDS_PER_AUTHOR = 8
SWEEP_S = 10.0
"""Time between two searches for expired records, in seconds."""


class RecordStore:
    """Records by key and author."""

    def __init__(self) -> None:
        self._kept: dict[bytes, dict[PeerId, tuple[int, bytes]]] = {}
        """Key -> author -> expiry in Unix seconds, and the record."""
        self._bytes = 0
        self._next_sweep_s = 0.0

    def put(self, data: bytes, sender: PeerId, now_s: float) -> bool:
        """Store a record that `sender` brought; False if it is not its own, not legal, or there is no room."""
        try:
            record = dht_records.decode_record(data, now_s)
        except PeerFault:
            return False
        if now_s >= self._next_sweep_s:
            self._sweep(now_s)
        old_s, old = self._kept.get(record.key, {}).get(sender, (0, b""))
        more_bytes = len(data) - len(old)
        has_room = self._bytes + more_bytes <= STORED_BYTES and (old or self._has_room(record.key, sender))
        if record.author != sender or record.expires_s < old_s or not has_room:
            return False
        self._kept.setdefault(record.key, {})[sender] = (record.expires_s, data)
        self._bytes += more_bytes
        return True

    def at(self, key: bytes) -> tuple[bytes, ...]:
        """Records under `key`."""
        return tuple(data for _, data in self._kept.get(key, {}).values())

    def _has_room(self, key: bytes, sender: PeerId) -> bool:
        by_sender = sum(sender in kept for kept in self._kept.values())
        return by_sender < RECORDS_PER_AUTHOR and len(self._kept.get(key, ())) < dht_records.RECORDS_PER_KEY

    def _sweep(self, now_s: float) -> None:
        """Forget expired records."""
        live = {
            key: {author: record for author, record in kept.items() if record[0] >= now_s}
            for key, kept in self._kept.items()
        }
        self._kept = {key: kept for key, kept in live.items() if kept}
        self._bytes = sum(len(data) for kept in self._kept.values() for _, data in kept.values())
        self._next_sweep_s = now_s + SWEEP_S
