"""Admission: a run is open to everybody, to a list of peers, or to holders of a permit that the owner signed.

An open run may ask newcomers to solve a puzzle, so that an identity costs some seconds of computing: a number
whose hash with run and PeerID begins with so many zero bits (`Solved`). Its check is one hash.

A permit certifies a key. A peer that knows the secret signs its own PeerID with it and opens its feed with both
signatures (`Admit`). Whether an `Admit` is genuine depends on RunSpec and entry alone, on every replica, for ever.
Expiry and number of members are checked only when a stranger shows its permit (`refusal_now`), so replays and
entries that members vouch for do not depend on a clock.
"""

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError, DecodeError, SignatureFault
from atoll.protocols.identity import Identity, Key, Signature, verify
from atoll.protocols.ids import DIGEST_BYTES, PeerId, RunId, digest, peer_id_of, public_key_of, short

Mode = Literal["open", "invite", "allowlist"]
MODES: tuple[Mode, ...] = ("open", "invite", "allowlist")
MAX_LISTED = 512
"""Most peers that a RunSpec may name: its signed bytes must stay below 64 KiB."""
MAX_NAME = 32
"""Most characters of a permit's name."""
MAX_UNIX_S = 1 << 40
"""Bound of legal expiry times, Unix seconds."""
Expiry: TypeAlias = Annotated[int, Meta(gt=0, lt=MAX_UNIX_S)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Admitted: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 20)]
CLOCK_SKEW_S = 3600
"""Seconds for which a permit is accepted after its expiry, because volunteers' clocks differ."""
MAX_PUZZLE_BITS = 32
"""Hardest puzzle: hours of one core."""
_PERMIT_DOMAIN = "permit/1"
_ADMIT_DOMAIN = "admit/1"
_PUZZLE_DOMAIN = b"atoll/puzzle/1\0"
PUZZLE_SLICE = 2048
"""Hashes between two pauses, some milliseconds: the node goes on to answer meanwhile."""


class AdmissionSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The part of a RunSpec that says which peers may take part."""

    mode: Mode = "open"
    """`open`: everybody; `invite`: holders of permits; `allowlist`: the peers in `members`."""
    members: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    """Sorted PeerIDs that are admitted besides the owner; empty in an open run."""
    puzzle_bits: Annotated[int, Meta(ge=1, le=MAX_PUZZLE_BITS)] | msgspec.UnsetType = msgspec.UNSET
    """Zero bits with which the hash of a newcomer's solution begins; unset: no puzzle. For open runs."""

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no run can have."""
        if self.mode == "open" and self.members:
            raise ConfigError("admission.members must be empty in an open run")
        if self.mode != "open" and self.puzzle_bits is not msgspec.UNSET:
            raise ConfigError("admission.puzzle_bits is for open runs: others admit by name or permit")
        if list(self.members) != sorted(set(self.members)):
            raise ConfigError("admission.members must be sorted, each peer once")
        for peer in self.members:
            try:
                public_key_of(peer)
            except DecodeError as error:
                raise ConfigError(f"admission.members: {peer!r}: {error}") from error


class Permit(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The owner's signed permission for holders of a secret to join."""

    key: Key
    """Public key of the secret."""
    expires: Expiry
    """Expiry time, Unix seconds."""
    name: Name
    """Name of the person it was made for; may be empty."""
    members: Admitted
    """Most members that may join with it; 0: any number. Concurrent replicas may admit a few more."""
    signature: Signature
    """Signature of the run's owner."""


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A permit with its secret, as an invite carries it. See Permit for the fields."""

    secret: Key
    expires: Expiry
    name: Name
    members: Admitted
    signature: Signature

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
        """Whether `peer` shows nothing to be admitted: an open run without a puzzle, the owner, a listed peer."""
        is_free = self.admission.mode == "open" and self.admission.puzzle_bits is msgspec.UNSET
        return is_free or peer == self.owner or peer in self.admission.members


def make_token(
    run: RunId, owner: Identity, secret: bytes, expires: int, name: str = "", members: int = 0
) -> Token:
    """A token signed by the owner. `secret`: 32 random bytes. Raises DecodeError for an illegal value."""
    permit = Permit(Identity(secret).public_key, expires, name, members, b"")
    signature = owner.sign(_PERMIT_DOMAIN, _permit_body(run, permit))
    token = Token(secret, expires, name, members, signature)
    check_name(token)
    return codec.decode(codec.encode(token), Token)


def check_name(permit: Permit | Token) -> None:
    """Raise DecodeError for a name that is too long or not printable."""
    if len(permit.name) > MAX_NAME or not permit.name.isprintable():
        raise DecodeError(f"permit: a name has at most {MAX_NAME} printable characters")


def verify_permit(rule: Rule, permit: Permit) -> None:
    """Raise SignatureFault unless the run's owner signed the permit for this run."""
    verify(rule.owner, _PERMIT_DOMAIN, _permit_body(rule.run, permit), permit.signature)


def prove(run: RunId, token: Token, author: PeerId) -> bytes:
    """Signature of the token's secret over (run, author)."""
    return Identity(token.secret).sign(_ADMIT_DOMAIN, codec.encode((run, author)))


def puzzle_refusal(rule: Rule, author: PeerId, nonce: int | None) -> str:
    """Reason why an open run does not admit `author` with this solution (None: it has none); empty if it does."""
    if rule.admits_by_name(author) or (nonce is not None and is_solved(rule, author, nonce)):
        return ""
    return (
        f"this run admits who solves its puzzle of {rule.admission.puzzle_bits} bits, and {short(author)} has not"
    )


def is_solved(rule: Rule, author: PeerId, nonce: int) -> bool:
    """Whether `nonce` solves the run's puzzle for this author."""
    found = digest(_PUZZLE_DOMAIN, rule.run, author.encode(), nonce.to_bytes(8, "little"))
    return int.from_bytes(found, "big") >> (8 * DIGEST_BYTES - (rule.admission.puzzle_bits or 0)) == 0


def solutions(rule: Rule, author: PeerId, first: int = 0) -> Iterator[int | None]:
    """Look for a solution from `first` on: None after every PUZZLE_SLICE tries without one, then the solution.

    Each number is as likely one as any other. So who begins anew at a random number has lost nothing.
    """
    for start in itertools.count(first, PUZZLE_SLICE):
        tries = range(start, start + PUZZLE_SLICE)
        found = next((nonce for nonce in tries if is_solved(rule, author, nonce)), None)
        yield found
        if found is not None:
            return


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
