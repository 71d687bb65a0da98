"""Messages of NAT traversal: observed addresses, dial-back, hole punching through a rendezvous, relayed circuits.

Each request is one frame on a stream of its own, and so is its answer. Wires: docs/wires/nat.md,
docs/wires/relay.md.
"""

from typing import Annotated, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.identity import Identity, Signature, verify
from atoll.protocols.ids import PeerId, RunId, public_key_of
from atoll.protocols.run.admission import MAX_UNIX_S

NAT_MAX_BYTES = 4096
RECORDS_BYTES = 64 * 1024
"""Plaintext bytes that an end of a circuit turns into one batch of TLS records."""
SEALED_MAX_BYTES = RECORDS_BYTES + 4096
"""Largest batch, record headers and tags included."""
REASON_CHARACTERS = 160
MADDRS = 8
_PUNCH_DOMAIN = "punch/1"

Reach = Literal["unknown", "public", "punchable", "relay-only"]
"""How others may reach a node: by a plain dial, by hole punching through a rendezvous, or through a relay only."""

Maddr: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"^[!-~]+\Z")]
Maddrs: TypeAlias = Annotated[tuple[Maddr, ...], Meta(max_length=MADDRS)]
Reason: TypeAlias = Annotated[str, Meta(max_length=REASON_CHARACTERS)]


class Look(msgspec.Struct, frozen=True, array_like=True, tag="look", forbid_unknown_fields=True):
    """Ask a peer which of our addresses it sees."""

    run: RunId


class Seen(msgspec.Struct, frozen=True, array_like=True, tag="seen", forbid_unknown_fields=True):
    """Answer to Look: the observed addresses, and facts about the answerer."""

    maddrs: Maddrs
    """Remote addresses of the requester's connections, as the answerer sees them."""
    reach: Reach
    """How the answerer itself may be reached."""
    relays: bool
    """Whether the answerer relays for others."""
    unix_s: Annotated[float, Meta(ge=0, lt=MAX_UNIX_S)]
    """Time on the answerer's clock, Unix seconds."""


class DialBack(msgspec.Struct, frozen=True, array_like=True, tag="dial-back", forbid_unknown_fields=True):
    """Ask a peer to dial these addresses of ours; it tries only those with the IP address that it sees."""

    run: RunId
    maddrs: Maddrs


class Reached(msgspec.Struct, frozen=True, array_like=True, tag="reached", forbid_unknown_fields=True):
    """Answer to DialBack: the addresses that could be reached."""

    maddrs: Maddrs


class Punch(msgspec.Struct, frozen=True, array_like=True, tag="punch", forbid_unknown_fields=True):
    """Ask a rendezvous to let `source` and `target` dial each other now.

    The source signs it, so that no rendezvous can make peers dial by itself.
    """

    run: RunId
    source: PeerId
    target: PeerId
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    claims: Maddrs
    """Public addresses of the source; empty behind a NAT."""
    signature: Signature


class Summons(msgspec.Struct, frozen=True, array_like=True, tag="summons", forbid_unknown_fields=True):
    """A punch that the rendezvous forwards to its target."""

    punch: Punch
    seen: Maddrs
    """Addresses of the source, as the rendezvous sees them."""


class Coming(msgspec.Struct, frozen=True, array_like=True, tag="coming", forbid_unknown_fields=True):
    """Answer to Punch and Summons: the target dials now."""

    claims: Maddrs
    """Public addresses of the target; empty behind a NAT."""
    seen: Maddrs
    """Addresses of the target, as the rendezvous sees them; the target leaves it empty."""


class NatRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused", forbid_unknown_fields=True):
    """The request was refused."""

    reason: Reason


class Circuit(msgspec.Struct, frozen=True, array_like=True, tag="circuit", forbid_unknown_fields=True):
    """First frame to a relay: open a circuit to `target`. The answer is OpenCircuit or NatRefused."""

    run: RunId
    target: PeerId


class Incoming(msgspec.Struct, frozen=True, array_like=True, tag="incoming", forbid_unknown_fields=True):
    """First frame from a relay to the target of a circuit. The answer is OpenCircuit or NatRefused."""

    run: RunId
    source: PeerId


class OpenCircuit(msgspec.Struct, frozen=True, array_like=True, tag="open", forbid_unknown_fields=True):
    """The circuit is open: every frame that follows belongs to its two ends."""


Ask: TypeAlias = Look | DialBack | Punch | Summons
Answer: TypeAlias = Seen | Reached | Coming | NatRefused


def sign_punch(run: RunId, source: Identity, target: PeerId, nonce: bytes, claims: tuple[str, ...]) -> Punch:
    """A punch request, signed by `source`."""
    draft = Punch(run, source.peer_id, target, nonce, claims[:MADDRS], b"")
    return msgspec.structs.replace(draft, signature=source.sign(_PUNCH_DOMAIN, _unsigned(draft)))


def check_punch(punch: Punch) -> PeerId:
    """The peer that signed the punch. Raises DecodeError or SignatureFault."""
    public_key_of(punch.target)
    verify(punch.source, _PUNCH_DOMAIN, _unsigned(punch), punch.signature)
    return punch.source


def decode_ask(data: bytes) -> Ask:
    """A request of the NAT wire. Raises DecodeError."""
    return codec.decode(data, cast(type[Ask], Ask), max_bytes=NAT_MAX_BYTES)


def decode_answer(data: bytes) -> Answer:
    """An answer of the NAT wire. Raises DecodeError."""
    return codec.decode(data, cast(type[Answer], Answer), max_bytes=NAT_MAX_BYTES)


def decode_opening(data: bytes) -> OpenCircuit | NatRefused:
    """An answer to Circuit or Incoming. Raises DecodeError."""
    return codec.decode(
        data, cast(type[OpenCircuit | NatRefused], OpenCircuit | NatRefused), max_bytes=NAT_MAX_BYTES
    )


def peer_named(text: str) -> PeerId:
    """A PeerID from a message, checked. Raises DecodeError."""
    public_key_of(PeerId(text))
    return PeerId(text)


def refused(reason: str) -> NatRefused:
    """A refusal with a printable, bounded reason."""
    return NatRefused(printable(reason)[:REASON_CHARACTERS])


def printable(reason: str) -> str:
    """The printable characters of a peer's text, safe for a log or a terminal."""
    return "".join(letter for letter in reason if letter.isprintable())


def _unsigned(punch: Punch) -> bytes:
    return codec.encode((punch.run, punch.source, punch.target, punch.nonce, punch.claims))
