"""Admission: a run is open to everybody, to a list of peers, or to holders of a permit that the owner signed.

A permit certifies a key. A peer that knows the secret signs its own PeerID with it and opens its feed with both
signatures (`Admit`). Whether an `Admit` is genuine depends on RunSpec and entry alone, on every replica, for ever.
Expiry and number of members are checked only when a stranger shows its permit (`refusal_now`), so replays and
entries that members vouch for do not depend on a clock.
"""

from typing import Literal

import msgspec

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import PeerId, RunId, peer_id_of, public_key_of, short

Mode = Literal["open", "invite", "allowlist"]
MODES: tuple[Mode, ...] = ("open", "invite", "allowlist")
MAX_LISTED = 512
"""Most peers that a RunSpec may name: its signed bytes must stay below 64 KiB."""
MAX_NAME = 32
"""Most characters of a permit's name."""
MAX_UNIX_S = 1 << 40
"""Bound of legal expiry times, Unix seconds."""
CLOCK_SKEW_S = 3600
"""Seconds for which a permit is accepted after its expiry, because volunteers' clocks differ."""
_PERMIT_DOMAIN = "permit/1"
_ADMIT_DOMAIN = "admit/1"


class AdmissionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of a RunSpec that says which peers may take part."""

    mode: Mode = "open"
    """`open`: everybody; `invite`: holders of permits; `allowlist`: the peers in `members`."""
    members: tuple[PeerId, ...] = ()
    """Sorted PeerIDs that are admitted besides the owner; empty in an open run."""

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        if self.mode not in MODES:
            raise ConfigError(f"admission.mode {self.mode!r} is not one of {', '.join(MODES)}")
        if len(self.members) > MAX_LISTED:
            raise ConfigError(f"admission.members: {len(self.members)} peers; at most {MAX_LISTED} are legal")
        if self.mode == "open" and self.members:
            raise ConfigError("admission.members must be empty in an open run")
        if list(self.members) != sorted(set(self.members)):
            raise ConfigError("admission.members must be sorted, each peer once")
        for peer in self.members:
            try:
                public_key_of(peer)
            except DecodeError as error:
                raise ConfigError(f"admission.members: {peer!r}: {error}") from error


class Permit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's signed permission for holders of a secret to join."""

    key: bytes
    """Public key of the secret, 32 bytes."""
    expires: int
    """Expiry time, Unix seconds."""
    name: str
    """Name of the person it was made for; may be empty."""
    members: int
    """Most members that may join with it; 0: any number. Concurrent replicas may admit a few more."""
    signature: bytes
    """Signature of the run's owner."""


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A permit with its secret, as an invite carries it. See Permit for the fields."""

    secret: bytes
    """Ed25519 seed, 32 bytes."""
    expires: int
    name: str
    members: int
    signature: bytes

    @property
    def permit(self) -> Permit:
        """The permit without the secret."""
        return Permit(Identity(self.secret).public_key, self.expires, self.name, self.members, self.signature)


class Rule(msgspec.Struct, frozen=True):
    """The values of a RunSpec that decide on admission."""

    run: RunId
    owner: PeerId
    admission: AdmissionSpec

    def admits_by_name(self, peer: PeerId) -> bool:
        """Whether `peer` is admitted without a permit: an open run, the owner, or a listed peer."""
        return self.admission.mode == "open" or peer == self.owner or peer in self.admission.members


def make_token(
    run: RunId, owner: Identity, secret: bytes, expires: int, name: str = "", members: int = 0
) -> Token:
    """A token signed by the owner. `secret`: 32 random bytes. Raises DecodeError for an illegal value."""
    permit = Permit(Identity(secret).public_key, expires, name, members, b"")
    signature = owner.sign(_PERMIT_DOMAIN, _permit_body(run, permit))
    permit = msgspec.structs.replace(permit, signature=signature)
    check_permit(permit)
    return Token(secret, expires, name, members, signature)


def check_token(token: Token) -> None:
    """Raise DecodeError for fields of illegal length or range."""
    if len(token.secret) != 32:
        raise DecodeError("token: a secret has 32 bytes")
    check_permit(token.permit)


def check_permit(permit: Permit) -> None:
    """Raise DecodeError for fields of illegal length or range."""
    if len(permit.key) != 32 or len(permit.signature) != SIGNATURE_BYTES:
        raise DecodeError("permit: illegal length of key or signature")
    if not (0 < permit.expires < MAX_UNIX_S and 0 <= permit.members < 1 << 20):
        raise DecodeError("permit: expiry or number of members outside its range")
    if len(permit.name) > MAX_NAME or not permit.name.isprintable():
        raise DecodeError(f"permit: a name has at most {MAX_NAME} printable characters")


def verify_permit(rule: Rule, permit: Permit) -> None:
    """Raise SignatureFault unless the run's owner signed the permit for this run."""
    verify(rule.owner, _PERMIT_DOMAIN, _permit_body(rule.run, permit), permit.signature)


def prove(run: RunId, token: Token, author: PeerId) -> bytes:
    """Signature of the token's secret over (run, author)."""
    return Identity(token.secret).sign(_ADMIT_DOMAIN, codec.encode((run, author)))


def refusal(rule: Rule, author: PeerId, permit: Permit | None, proof: bytes = b"") -> str:
    """Reason why `author` may never write in this run; empty if it may. The same on every replica, at any time."""
    if rule.admits_by_name(author):
        return ""
    if rule.admission.mode == "allowlist":
        return f"{short(author)} is not on the list of peers that this run admits"
    if permit is None:
        return f"this run is by invitation, and {short(author)} has shown no permit"
    try:
        verify_permit(rule, permit)
    except SignatureFault:
        return f"the permit of {short(author)} was not signed by the owner of this run"
    try:
        verify(peer_id_of(permit.key), _ADMIT_DOMAIN, codec.encode((rule.run, author)), proof)
    except SignatureFault:
        return f"the permit of {short(author)} was made out for another peer"
    return ""


def refusal_now(permit: Permit, unix_s: float, used: int) -> str:
    """Reason to refuse a genuine permit from a stranger now; else empty. `used`: members that joined with it."""
    if unix_s > permit.expires + CLOCK_SKEW_S:
        return f"the permit expired {_ago(unix_s - permit.expires)} ago; ask for a new invite"
    if permit.members and used >= permit.members:
        return f"the permit is used up: {used} of {permit.members} have joined with it; ask for a new invite"
    return ""


def _permit_body(run: RunId, permit: Permit) -> bytes:
    return codec.encode((run, permit.key, permit.expires, permit.name, permit.members))


def _ago(seconds: float) -> str:
    hours = int(seconds // 3600)
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {int(seconds % 3600 // 60)} m"
