"""Invites: a signed link with the run to join, seeds to dial, a time of expiry and, if needed, a permit.

    atoll:<base32>      version u8 | length u16 | check 4 bytes | body

Version 1 is the invite itself. Version 2, the short link, has 106 characters with an IPv4 address: the id of an
invite of version 1, and the key and one address of the node that signed it and gives it to whoever names that id.

Lower-case base32 (RFC 4648, no padding) survives line breaks, double clicks and changes of case; in capitals a QR
code packs it tighter than base64. Length and check distinguish links that are cut off, mistyped or forged; their
places are the same in every version.
"""

import base64
import ipaddress
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import Identity, Key, Signature, verify
from atoll.protocols.ids import PeerId, RunId, digest, peer_id_of, public_key_of, short
from atoll.protocols.run.admission import Expiry, Token, check_name

INVITE_VERSION = 1
SHORT_VERSION = 2
INVITE_ID_BYTES = 16
"""First bytes of a hash of the body. Another invite with the same id would take 2^128 tries."""
LINK_MAX_CHARACTERS = 1 << 14
"""More than any link of version 1 has."""
SCHEME = "atoll:"
EMBED_MAX_BYTES = 1536
"""Largest signed run, in bytes, that travels inside the link; larger ones are fetched from a seed."""
MAX_SEEDS = 16
MAX_MADDRS = 8
_BODY_MAX_BYTES = 8192
_HEADER_BYTES = 7
_HEADER_CHARACTERS = 16
_ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyz234567")
_DOMAIN = "invite/1"
_SHORT_HEAD_BYTES = INVITE_ID_BYTES + 32 + 1
_IP_BYTES = {4: 4, 6: 16}
_TCP, _QUIC = 0x10, 0x20
_TRANSPORTS = {_TCP: "tcp/{}", _QUIC: "udp/{}/quic-v1"}
_PORT_BYTES = 2
_TEXT_MAX_BYTES = 256
_Maddr: TypeAlias = Annotated[str, Meta(max_length=256, pattern=r"^/[!-~]*\Z")]


class Seed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node that a newcomer dials first."""

    key: Annotated[bytes, Meta(max_length=32)]
    """Public key of the node, 32 bytes; empty for a name (`/dnsaddr/…`) of several nodes."""
    maddrs: Annotated[tuple[_Maddr, ...], Meta(min_length=1, max_length=MAX_MADDRS)]
    """Multiaddrs of the node, without its own `/p2p/…` part."""


class Invite(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The body of a link."""

    run: RunId
    """Run id; it is the hash of the RunSpec, so no other spec has it."""
    expires: Expiry
    """Time of expiry, Unix seconds."""
    seeds: Annotated[tuple[Seed, ...], Meta(max_length=MAX_SEEDS)]
    token: Annotated[tuple[Token, ...], Meta(max_length=1)]
    """At most one token; none if the run needs no permit."""
    run_file: Annotated[bytes, Meta(max_length=EMBED_MAX_BYTES)]
    """The signed RunSpec; empty: fetch it from a seed."""
    key: Key
    """The signer's public key."""
    signature: Signature

    @property
    def signer(self) -> PeerId:
        """PeerID of the signer: the owner or another member."""
        return peer_id_of(self.key)

    @property
    def seed_texts(self) -> tuple[str, ...]:
        """The seeds as configuration texts: `…/p2p/PEERID`, or a `/dnsaddr/…` name alone."""
        tails = [(seed, f"/p2p/{peer_id_of(seed.key)}" if seed.key else "") for seed in self.seeds]
        return tuple(maddr + tail for seed, tail in tails for maddr in seed.maddrs)


@dataclass(frozen=True, slots=True)
class ShortInvite:
    """The body of a short link."""

    id: bytes
    """Id of the invite that it stands for, INVITE_ID_BYTES."""
    key: bytes
    """Public key of the node that gives the invite, 32 bytes."""
    maddrs: tuple[str, ...]
    """Multiaddrs of that node: one IP address and port, by one transport or both; or any one multiaddr."""

    @property
    def peer(self) -> PeerId:
        """PeerID of the node that gives the invite."""
        return peer_id_of(self.key)


def seeds_of(texts: list[str]) -> tuple[Seed, ...]:
    """Seeds of configuration texts (`…/p2p/PEERID` or `/dnsaddr/…`), grouped by peer. Raises ConfigError."""
    grouped: dict[bytes, list[str]] = {}
    for text in texts:
        maddr, separator, peer = text.strip().rpartition("/p2p/")
        if not separator:
            maddr, peer = text.strip(), ""
        try:
            key = public_key_of(PeerId(peer)) if peer else b""
        except DecodeError as error:
            raise ConfigError(f"seed {text!r}: {error}") from error
        if not key and not maddr.startswith("/dnsaddr/"):
            raise ConfigError(f"seed {text!r} does not end in /p2p/PEERID")
        grouped.setdefault(key, []).append(maddr)
    return tuple(Seed(key, tuple(dict.fromkeys(maddrs))) for key, maddrs in grouped.items())


def sign_invite(signer: Identity, draft: Invite) -> str:
    """The signed link of `draft`, which has no key and signature yet. Raises DecodeError for an illegal value."""
    keyed = msgspec.structs.replace(draft, key=signer.public_key, signature=b"")
    body = codec.encode(msgspec.structs.replace(keyed, signature=signer.sign(_DOMAIN, _unsigned(keyed))))
    _decoded(body)
    return link_of(body)


def make_invite(
    signer: Identity,
    run: RunId,
    seeds: tuple[Seed, ...],
    expires: int,
    token: Token | None = None,
    run_file: bytes = b"",
) -> str:
    """A signed link. `expires`: Unix seconds. Raises DecodeError for an illegal value."""
    tokens = (token,) if token is not None else ()
    draft = Invite(run=run, expires=expires, seeds=seeds, token=tokens, run_file=run_file, key=b"", signature=b"")
    return sign_invite(signer, draft)


def invite_id(invite: Invite) -> bytes:
    """Id of a signed invite. Only who has seen the invite knows it: the signature goes into the hash."""
    return digest(b"invite id", codec.encode(invite))[:INVITE_ID_BYTES]


def shorten(link: str) -> str:
    """The short form of a link; empty if the link names no address at which its signer can be dialled directly.

    Raises DecodeError.
    """
    invite = read_invite(link)
    maddrs = [maddr for seed in invite.seeds if seed.key == invite.key for maddr in seed.maddrs]
    maddrs = [maddr for maddr in maddrs if "/p2p-circuit" not in maddr]  # newcomers open no circuits
    packed = [place for place in map(_packed_ip, maddrs) if place]
    if packed:
        best = min(packed, key=len)  # IPv4 before IPv6
        kinds = [place[0] for place in packed if place[1:] == best[1:]]
        place = bytes([best[0] | max(kinds) | min(kinds)]) + best[1:]
    else:
        texts = [maddr.encode() for maddr in maddrs if len(maddr) < _TEXT_MAX_BYTES]
        if not texts:
            return ""
        place = b"\0" + min(texts, key=len)
    return link_of(invite_id(invite) + invite.key + place, SHORT_VERSION)


def read_short(text: str) -> ShortInvite | None:
    """The body of a short link; None for a link of another version. Raises DecodeError with the reason."""
    version, body = _unpack(text)
    if version != SHORT_VERSION:
        return None
    if len(body) < _SHORT_HEAD_BYTES:
        raise DecodeError("short invite: no address")
    key = body[INVITE_ID_BYTES : _SHORT_HEAD_BYTES - 1]
    return ShortInvite(body[:INVITE_ID_BYTES], key, _short_maddrs(body[_SHORT_HEAD_BYTES - 1 :]))


def read_invite(text: str) -> Invite:
    """The verified invite of a link of version 1, expired or not. Raises DecodeError with the reason."""
    version, body = _unpack(text)
    if version > SHORT_VERSION:
        raise DecodeError(
            f"the invite was made by a newer atoll (version {version}; this one reads {SHORT_VERSION})",
            hint="upgrade atoll",
        )
    if version == SHORT_VERSION:
        raise DecodeError("this is a short invite: its node has the rest", hint="ask for one made with --embed")
    if version != INVITE_VERSION:
        raise DecodeError(f"the invite has version {version}, which never was")
    invite = _decoded(body)
    try:
        verify(invite.signer, _DOMAIN, _unsigned(invite), invite.signature)
    except SignatureFault as error:
        raise DecodeError(
            f"the invite was changed after {short(invite.signer)} signed it", hint="do not use it; ask for another"
        ) from error
    return invite


def decode_invite(text: str, unix_s: float) -> Invite:
    """The verified invite of a link. Raises DecodeError, also if it has expired at `unix_s`."""
    invite = read_invite(text)
    if unix_s >= invite.expires:
        raise DecodeError(
            f"the invite expired {_span(unix_s - invite.expires)} ago",
            hint=f"ask {short(invite.signer)}, who made it, for a new one (or set this machine's clock)",
        )
    return invite


def is_invite(text: str) -> bool:
    """Whether `text` looks like an atoll link, legal or not."""
    return text.strip().lower().startswith(SCHEME)


def link_again(invite: Invite) -> str:
    """The link that `invite` was read from."""
    return link_of(codec.encode(invite))


def link_of(body: bytes, version: int = INVITE_VERSION) -> str:
    """The link with this body."""
    head = bytes([version]) + len(body).to_bytes(2, "big")
    blob = head + _check_of(head, body) + body
    return SCHEME + base64.b32encode(blob).decode().rstrip("=").lower()


def _unpack(text: str) -> tuple[int, bytes]:
    """Version and body of a link. Raises DecodeError that distinguishes cut and mistyped links."""
    if not is_invite(text):
        raise DecodeError(f"this is not an invite: an invite begins with {SCHEME}")
    if len(text) > 4 * _BODY_MAX_BYTES:
        raise DecodeError("this is not an invite: it is far too long")
    packed = "".join(text.split()).lower().removeprefix(SCHEME).removeprefix("//").rstrip("/")
    for place, letter in enumerate(packed):
        if letter not in _ALPHABET:
            raise _mistyped(f"{letter!r} at place {place + 1} is in no invite")
    if len(packed) < _HEADER_CHARACTERS:
        raise _cut(len(packed), None)
    head = base64.b32decode(packed[:_HEADER_CHARACTERS].upper())
    length = int.from_bytes(head[1:3], "big")
    wanted = -(-(_HEADER_BYTES + length) * 8 // 5)
    if length > _BODY_MAX_BYTES or len(packed) > wanted:
        raise _mistyped(f"{len(packed)} characters where {wanted} belong")
    if len(packed) < wanted:
        raise _cut(len(packed), wanted)
    blob = base64.b32decode(packed.upper() + "=" * (-len(packed) % 8))
    if _check_of(blob[:3], blob[_HEADER_BYTES:]) != blob[3:_HEADER_BYTES]:
        raise _mistyped("its check does not fit")
    if base64.b32encode(blob).decode().rstrip("=").lower() != packed:
        raise _mistyped("its last character does not fit")
    return blob[0], blob[_HEADER_BYTES:]


def _packed_ip(maddr: str) -> bytes:
    """An IP address and port as `kind u8 | address | port u16`; empty for every other multiaddr."""
    try:
        _, _, host, *rest = maddr.split("/")
        address = ipaddress.ip_address(host)
        port = int(rest[1])
        text = "/".join(rest)
        kind = next(kind for kind, form in _TRANSPORTS.items() if form.format(port) == text)
        place = bytes([address.version | kind]) + address.packed + port.to_bytes(_PORT_BYTES, "big")
    except (ValueError, IndexError, OverflowError, StopIteration):
        return b""
    return place if f"/ip{address.version}/{address}/{text}" == maddr else b""


def _short_maddrs(place: bytes) -> tuple[str, ...]:
    """The multiaddrs of a short link, from its kind on. Raises DecodeError."""
    kind, data = place[0], place[1:]
    version, transports = kind & 0x0F, kind & 0xF0
    if kind == 0:
        text = data.decode("ascii", "replace")
        if not 1 < len(data) < _TEXT_MAX_BYTES or text[0] != "/" or not all("!" <= sign <= "~" for sign in text):
            raise DecodeError("short invite: an illegal address")
        return (text,)
    size = _IP_BYTES.get(version)
    if size is None or not transports or transports & ~(_TCP | _QUIC) or len(data) != size + _PORT_BYTES:
        raise DecodeError("short invite: an illegal address")
    address = ipaddress.ip_address(data[:size])
    port = int.from_bytes(data[size:], "big")
    forms = [form for kind, form in _TRANSPORTS.items() if transports & kind]
    return tuple(f"/ip{version}/{address}/{form.format(port)}" for form in forms)


def _check_of(head: bytes, body: bytes) -> bytes:
    return digest(b"invite", head, body)[:4]


def _cut(have: int, wanted: int | None) -> DecodeError:
    part = f"{have} of {wanted} characters" if wanted else f"only {have} characters"
    return DecodeError(f"the invite is cut off: {part} are here", hint="copy the whole link, in quotes")


def _mistyped(what: str) -> DecodeError:
    return DecodeError(f"the invite is mistyped: {what}", hint="copy it again")


def _unsigned(invite: Invite) -> bytes:
    return codec.encode((invite.run, invite.expires, invite.seeds, invite.token, invite.run_file, invite.key))


def _decoded(body: bytes) -> Invite:
    invite = codec.decode(body, Invite, max_bytes=_BODY_MAX_BYTES)
    for seed in invite.seeds:
        if len(seed.key) not in (0, 32):
            raise DecodeError("invite: a seed with an illegal key")
        if not seed.key and not all(maddr.startswith("/dnsaddr/") for maddr in seed.maddrs):
            raise DecodeError("invite: a seed without a key that is no /dnsaddr name")
    for token in invite.token:
        check_name(token)
    return invite


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"
