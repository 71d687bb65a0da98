"""Registers: ephemeral signed state; per author and type the newest value counts, until its time to live ends.

Registers are ordered by (epoch, seq), never by wall clock: `epoch` rises by one each time a node starts, `seq`
with each write. A receiver counts the time to live from the arrival of the register, on its own clock.
"""

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import DecodeError
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import DIGEST_BYTES, Digest, Link, PeerId, RecordRound, RunId
from atoll.protocols.ledger.audit_claims import AuditCall, AuditFindings
from atoll.protocols.ledger.peer_names import PeerName, name_fault
from atoll.protocols.run.experts import MAX_EXPERTS
from atoll.protocols.run.moments import MAX_OFFERED
from atoll.protocols.wires import REGISTER

REGISTER_VERSION = REGISTER.newest
REGISTER_MAX_BYTES = 4096
MAX_TTL_S = 3600.0
"""Longest legal time to live, in seconds."""
LOSS_END = 1e6
"""A lease says no loss from here on."""
_DOMAIN = "register/6"

Activity = Literal["syncing", "training", "paused", "observing", "done", "leaving"]
"""`leaving`: it ends as soon as others have what it alone has. Nobody that leaves too counts on it."""
RoundOrNone: TypeAlias = Annotated[int, Meta(ge=-1, lt=1 << 24)]
Expert: TypeAlias = Annotated[int, Meta(ge=0, lt=MAX_EXPERTS)]
Ordinal: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 48)]
Plain: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[ -~]+\Z")]
"""Printable ASCII: addresses are shown on terminals."""


class Lease(msgspec.Struct, frozen=True, array_like=True, tag="lease", forbid_unknown_fields=True):
    """`author` is a member of the run: its activity and progress."""

    activity: Activity
    round: RecordRound
    """Round that it trains, or would train next."""
    final: RoundOrNone
    """Newest round that it knows to be final; -1: none."""
    snapshot: Link
    """BLAKE3 of its newest snapshot blob; empty if it has none."""
    snapshot_round: RoundOrNone
    """Round whose final state the snapshot holds; -1: none."""
    tokens_per_s: Annotated[float, Meta(ge=0, lt=1e12)]
    """Training throughput of the member."""
    loss: Annotated[float, Meta(ge=0, lt=LOSS_END)] = 0.0
    """Mean training loss of the newest round that it trained, nats per token; 0: none. A claim, as all of this."""
    round_s: Annotated[float, Meta(ge=0, lt=1e9)] = 0.0
    """Seconds from the start of one round to that of the next, a mean of its newest; 0: not known yet."""
    name: PeerName = ""
    """What its operator calls it (`peer_names.name_fault` says what is legal); empty: nothing."""


class Holding(msgspec.Struct, frozen=True, array_like=True, tag="holding", forbid_unknown_fields=True):
    """Experts that `author` trains and could train; published in runs with `outer.holders` only."""

    experts: Annotated[bytes, Meta(max_length=MAX_EXPERTS // 8)]
    """Bitmap of the experts that it trains (protocols/run/experts.py); empty: all."""
    room: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)]
    """Number of experts of each layer that it could train."""
    moments: Annotated[tuple[tuple[Expert, Digest], ...], Meta(max_length=MAX_OFFERED)] = ()
    """Experts that it gave up, each with the blob id of its optimizer moments (protocols/run/moments.py)."""


class Addresses(msgspec.Struct, frozen=True, array_like=True, tag="addresses", forbid_unknown_fields=True):
    """Addresses at which `author` may be dialled."""

    maddrs: Annotated[tuple[Plain, ...], Meta(max_length=16)]
    """Multiaddrs without the `/p2p/…` part."""


class Validation(msgspec.Struct, frozen=True, array_like=True, tag="validation", forbid_unknown_fields=True):
    """`author` computed the validation loss of a final round; published by nodes with the role `evaluate`."""

    round: RecordRound
    state: Digest
    """Digest of Θ_final after the round."""
    val_bpb: Annotated[float, Meta(ge=0, lt=1e6)]
    """Bits per byte of the run's validation windows. A claim, not a proof."""


Claim: TypeAlias = Validation | AuditCall | AuditFindings
"""What nodes say of work that others need not repeat."""
ClaimKind = TypeVar("ClaimKind", Validation, AuditCall, AuditFindings)
Value = Lease | Addresses | Holding | Claim


class Register(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One signed register. Its key is (author, tag of the value)."""

    version: int
    run: RunId
    author: PeerId
    epoch: Ordinal
    seq: Ordinal
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)]
    """Time to live, in seconds."""
    value: Value
    signature: Signature


def unsigned(reg: Register) -> bytes:
    """The bytes that the signature covers."""
    return codec.encode((reg.version, reg.run, reg.author, reg.epoch, reg.seq, reg.ttl_s, reg.value))


def sign_register(run: RunId, author: Identity, epoch: int, seq: int, ttl_s: float, value: Value) -> Register:
    """A register, signed by its author."""
    draft = Register(
        version=REGISTER_VERSION,
        run=run,
        author=author.peer_id,
        epoch=epoch,
        seq=seq,
        ttl_s=ttl_s,
        value=value,
        signature=b"",
    )
    return msgspec.structs.replace(draft, signature=author.sign(_DOMAIN, unsigned(draft)))


def decode_register(data: bytes, run: RunId) -> Register:
    """A legal, signed register of this run. Raises DecodeError or SignatureFault."""
    reg = codec.decode(data, Register, max_bytes=REGISTER_MAX_BYTES)
    if reg.version != REGISTER_VERSION or reg.run != run:
        raise DecodeError("register of another version or run")
    if isinstance(reg.value, Lease):
        if len(reg.value.snapshot) not in (0, DIGEST_BYTES):
            raise DecodeError("lease: a digest has 32 bytes")
        if fault := name_fault(reg.value.name):
            raise DecodeError(f"lease: the name: {fault}")
    verify(reg.author, _DOMAIN, unsigned(reg), reg.signature)
    return reg
