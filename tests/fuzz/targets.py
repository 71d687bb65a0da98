"""Every decoder that gets bytes of a peer, of a person or of another program, with examples of legal bytes.

One contract: a decoder returns what the bytes say, or raises what it says that it raises; nothing else leaves it.
"""

import io
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

from atoll.node.checkpoint.tensorfile import read_header
from atoll.node.daemon.web import http_messages
from atoll.node.learning.reduction.packing import packed, unpacked
from atoll.p2p.blobs.frames import unpack_bits
from atoll.p2p.discovery.dht_records import decode_record
from atoll.p2p.discovery.dnsaddr import parse_record
from atoll.p2p.host.maddrs import parse_maddr
from atoll.p2p.rpc import frames
from atoll.protocols import codec, nat
from atoll.protocols.blobs import decode_manifest, manifest_of_bytes
from atoll.protocols.data.shard_index import decode_index
from atoll.protocols.errors import AtollError, PeerFault
from atoll.protocols.ledger.records import decode_entry
from atoll.protocols.ledger.reduction import ReductionRules, decode_ask, decode_proof
from atoll.protocols.ledger.registers import decode_register
from atoll.protocols.local import control_lines, control_messages
from atoll.protocols.run.invite import read_invite, read_short
from atoll.protocols.run.run_spec import open_run
from atoll.protocols.run.sized_payload import SizedLayout, part_bytes, read_head, write_head
from tests.golden.__main__ import recorded
from tests.golden.messages import CASES, PLACE, RUN, UNIX_S

MAX_BYTES = 1 << 20
HEAD = b"GET /data.json HTTP/1.1\r\nHost: localhost:8080\r\nAccept: */*\r\n\r\n"
SIZED = SizedLayout((3, 1, 2), (16, 64), 64, True, (16, 64, 64))
BLOB = manifest_of_bytes(b"blob")


class Target(NamedTuple):
    """One decoder."""

    decode: Callable[[bytes], object]
    examples: tuple[bytes, ...]
    refuses: tuple[type[AtollError], ...] = (PeerFault,)
    """What it may raise."""


def _golden(*names: str) -> tuple[bytes, ...]:
    messages = recorded("wires")["messages"]
    return tuple(bytes.fromhex(messages[name]) for name in names)


def _text(read: Callable[[str], object]) -> Callable[[bytes], object]:
    """A decoder of text, which gets any characters."""
    return lambda data: read(data.decode("utf-8", "surrogateescape"))


def _message(kind: type) -> Callable[[bytes], object]:
    return lambda data: codec.decode(data, kind, max_bytes=MAX_BYTES)


@cache
def targets() -> Mapping[str, Target]:
    """All by name; those of `codec.decode` have the names of their golden examples."""
    golden, other = recorded("wires"), recorded("wires")["other bytes"]
    entries = tuple(name for name in CASES if name.startswith("entry: "))
    leases = tuple(name for name in CASES if name.startswith("register: "))
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    special = {
        "decode_entry": Target(lambda data: decode_entry(data, RUN), _golden(*entries)),
        "decode_register": Target(lambda data: decode_register(data, RUN), _golden(*leases)),
        "decode_manifest": Target(lambda data: decode_manifest(data, BLOB.id), (codec.encode(BLOB),)),
        "decode_index": Target(decode_index, _golden("ShardIndex")),
        "decode_proof": Target(
            lambda data: decode_proof(data, ReductionRules(RUN, 100, 64, 128, 64)), _golden("FaultProof")
        ),
        "decode_ask, of rows": Target(decode_ask, _golden("RowsAsk", "OpeningAsk")),
        "decode_ask, nat": Target(nat.decode_ask, _golden("Look", "DialBack", "Punch")),
        "decode_answer, nat": Target(nat.decode_answer, _golden("Seen", "Reached", "Coming", "NatRefused")),
        "decode_opening, nat": Target(nat.decode_opening, _golden("OpenCircuit", "NatRefused")),
        "decode_record, DHT": Target(
            lambda data: decode_record(data, UNIX_S), _golden("DhtRecord: members", "DhtRecord: runs")
        ),
        "open_run": Target(open_run, _golden("SignedRun")),
        "parse, calls": Target(
            frames.parse, tuple(bytes.fromhex(other[name]) for name in ("request", "reply", "failure", "notice"))
        ),
        "unpack_bits": Target(lambda data: unpack_bits(data, 100), (b"", b"\xff" * 13)),
        "read_head, a k for each tensor": Target(lambda data: read_head(data, SIZED), (_sized(),)),
        "unpacked, error feedback": Target(unpacked, (_feedback(0), _feedback(3))),
        "read_header, safetensors": Target(
            lambda data: read_header(io.BytesIO(data), 1 << 16), (len(header).to_bytes(8, "little") + header,)
        ),
        "read_invite": Target(_text(read_invite), (golden["invite"].encode(),)),
        "read_short": Target(_text(read_short), (golden["short invite"].encode(),)),
        "parse_maddr": Target(_text(parse_maddr), (PLACE.encode(), b"/dns4/node.example/udp/4001/quic-v1")),
        "parse_record, dnsaddr": Target(parse_record, (b"dnsaddr=" + PLACE.encode(),)),
        "parse, HTTP": Target(http_messages.parse, (HEAD,), ()),
        "decode_ask, control": Target(
            control_lines.decode_ask, (control_lines.encode_ask(control_messages.GetRounds(5)),)
        ),
    }
    plain = {name: Target(_message(case.kind), _golden(name)) for name, case in CASES.items() if not case.is_local}
    return special | plain


def _feedback(scale: int) -> bytes:
    import torch  # takes a second

    return packed(torch.arange(4096, dtype=torch.int32) % 7 * scale)


def _sized() -> bytes:
    parts = sum(part_bytes(chunks, k) for chunks, k in zip(SIZED.chunks_T, SIZED.chosen_T, strict=True))
    return write_head(SIZED, [[500, 400]] * 3) + bytes(parts)


def check(target: Target, data: bytes) -> bool:
    """Whether the decoder takes these bytes. What it must not raise comes through."""
    try:
        target.decode(data)
    except target.refuses:
        return False
    return True
