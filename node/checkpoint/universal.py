"""The descriptions in a universal checkpoint, and their rules. A folder:

    run                       the signed run
    tokenizer.json            where the run has one of its own
    PEER.safetensors          what a member trains (see below)
    PEER.json                 what that file is: its hash, its run, round and state, signed; written after it
    votes                     why that round is final with that state (node/daemon/certificates/certificate.py)
    manifest.json             all of them, and from whom each part is taken; written last

A member writes the atoms that it trains; the manifest is written when every atom is there, all are of one run,
round and state, and a quorum of the members has signed for what it wrote. Of what several train (all that is no
expert's; experts with several holders) the moments are taken from the member that took most steps with it, and of
these from the one with the highest BLAKE3(run, part, peer).

The tensors of PEER.safetensors; which they are is a pure function of model, optimizer and who trains what:

    weight/ATOM       int32, units of 2⁻²⁴, natural shape: Θ_final
    exp_avg/ATOM      float32: first moment, or Muon's momentum;  step/ATOM `[1]`: steps of the optimizer
    exp_avg_sq/ATOM   float32: Adam's second moment; not of a matrix that Muon moves
    error/ATOM        float32: error feedback: what was trained and not sent yet

A shard is what one member trains: all that is no expert's, and its experts; beside that `error` of experts that
it trained earlier. The moments files are everything but the weights, of all atoms, once
(protocols/run/moments.py).
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from atoll.node.checkpoint.tensorfile import Spec, all_finite
from atoll.protocols.errors import ConfigError, DecodeError
from atoll.protocols.identity import SIGNATURE_BYTES, Identity, verify
from atoll.protocols.ids import DIGEST_BYTES, PeerId, digest, public_key_of
from atoll.protocols.run.model_spec import BIAS, Atom, ModelSpec, atoms, expert_of
from atoll.protocols.run.moments import MAX_STEPS, Optimizer, file_of, kinds_of

VERSION = 2
_DOMAIN = "shard/2"
SHARED = "shared"
"""The part that is no expert's. Other parts are experts, by their number."""
JSON_MAX_BYTES = 16 << 20
_MAX_COUNT = 1 << 53
S = TypeVar("S", bound=msgspec.Struct)
WEIGHT, STEP, ERROR = "weight", "step", "error"
MOMENTS_NOTE = "moments/1"


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The signed description of one member's file."""

    version: int
    run: str
    round: int
    """Round of Θ_final."""
    state: str
    """State digest of Θ_final."""
    peer: PeerId
    steps: dict[str, int]
    """Part -> steps that its moments saw here. What is not named is not trained here."""
    left: tuple[int, ...]
    """Experts that are not trained here any more, of which something was not said yet; rising."""
    bytes: int
    blake3: str
    signature: str
    """The peer's, over these words without it (`signed`)."""

    @property
    def file(self) -> str:
        """Name of the tensors' file."""
        return f"{self.peer}.safetensors"

    @property
    def note(self) -> str:
        """What the tensors' file says of itself."""
        return f"shard/{self.version} run={self.run} round={self.round} state={self.state} peer={self.peer}"

    @property
    def experts(self) -> frozenset[int]:
        """Numbers of the experts that the member trains."""
        return frozenset(int(part) for part in self.steps if part != SHARED)


class CheckpointManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The index of a whole checkpoint."""

    version: int
    run: str
    round: int
    state: str
    shards: tuple[Shard, ...]
    """Descriptions of all shards, by peer."""
    holders: dict[str, PeerId]
    """Part -> the member whose moments count."""
    votes: str
    """BLAKE3 of the file that proves the round final."""
    members: tuple[PeerId, ...]
    """Authors of the newest final sets (node/daemon/certificates/certificate.py), rising."""
    quorum: bool
    """Whether shards of a quorum of the members are in it. If not, what the others had not sent was given up."""

    @property
    def absent(self) -> tuple[PeerId, ...]:
        """Members whose shard is not in the checkpoint."""
        return tuple(sorted({*self.members} - {shard.peer for shard in self.shards}))

    def who_signed(self) -> str:
        """One line for people: how many members signed."""
        count = len(self.members)
        line = f"signed by {count - len(self.absent)} of the {count} members of its newest rounds"
        return line if self.quorum else f"{line}, less than a quorum: what the others had not sent is lost"


class _Versioned(msgspec.Struct, frozen=True):
    version: int


def to_json(words: Shard | CheckpointManifest) -> bytes:
    """JSON of a description: equal values give equal bytes."""
    return json.dumps(msgspec.to_builtins(words), sort_keys=True, indent=1).encode() + b"\n"


def signed(draft: Shard, identity: Identity) -> Shard:
    """The words with their signature. The peer must be the identity's."""
    return msgspec.structs.replace(draft, signature=identity.sign(_DOMAIN, _unsigned(draft)).hex())


def check_signature(shard: Shard) -> None:
    """Raise SignatureFault unless its peer signed these words."""
    verify(shard.peer, _DOMAIN, _unsigned(shard), bytes.fromhex(shard.signature))


def _unsigned(shard: Shard) -> bytes:
    """Their one form, with an empty signature."""
    return to_json(msgspec.structs.replace(shard, signature=""))


def from_json(data: bytes, kind: type[S]) -> S:
    """Raises DecodeError for what `to_json` does not write, naming the version where it is another."""
    try:
        if len(data) > JSON_MAX_BYTES:
            raise DecodeError("it is too large")
        if (found := msgspec.json.decode(data, type=_Versioned).version) != VERSION:
            raise DecodeError(f"version {found}; this program reads {VERSION}")
        words = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise DecodeError(str(error)) from error
    for shard in (words,) if isinstance(words, Shard) else getattr(words, "shards", ()):
        _check(shard)
    return words


def joined(
    shards: Iterable[Shard], experts: int, votes: str, members: Collection[PeerId], needed: int
) -> CheckpointManifest:
    """The manifest of these shards of a model with so many experts. Pure. Raises ConfigError.

    `votes`, `members`: as in `CheckpointManifest`. `needed`: how many of the members are a quorum.
    """
    found = sorted(shards, key=lambda shard: shard.peer)
    if not found:
        raise ConfigError("there are no shards in it", hint="run `atoll checkpoint save DIR` on every node")
    _check_same(found)
    parts = [SHARED, *map(str, range(experts))]
    holders = {part: _holder(found, part) for part in parts}
    missing = [part for part, peer in holders.items() if peer is None]
    if missing:
        raise ConfigError(
            f"nobody's shard has {'expert' if missing != [SHARED] else 'part'} {', '.join(missing)}",
            hint="add the shards of the nodes that train it",
        )
    extra = [part for shard in found for part in shard.steps if part not in parts]
    if extra or any(expert >= experts for shard in found for expert in shard.left):
        raise ConfigError(f"a shard has an expert that a model with {experts} does not have")
    chosen = {part: peer for part, peer in holders.items() if peer is not None}
    one = found[0]
    present = sum(shard.peer in members for shard in found)
    return CheckpointManifest(
        version=VERSION, run=one.run, round=one.round, state=one.state, shards=tuple(found), holders=chosen,
        votes=votes, members=tuple(sorted(members)), quorum=present >= needed,
    )  # fmt: skip


def _check_same(shards: Sequence[Shard]) -> None:
    one = shards[0]
    for other in shards[1:]:
        if other.peer == one.peer:
            raise ConfigError(f"two shards are of {one.peer}")
        for what in ("run", "round", "state"):
            mine, theirs = getattr(one, what), getattr(other, what)
            if mine != theirs:
                raise ConfigError(
                    f"the shards are not of one {what}: …{one.peer[-8:]} {str(mine)[:16]}, "
                    f"…{other.peer[-8:]} {str(theirs)[:16]}",
                    hint="save all of them when all nodes have the same final round",
                )


def _holder(shards: Sequence[Shard], part: str) -> PeerId | None:
    able = [shard for shard in shards if part in shard.steps]
    return max(able, key=lambda shard: (shard.steps[part], _score(shard, part))).peer if able else None


def _score(shard: Shard, part: str) -> bytes:
    return digest(b"atoll checkpoint\0", shard.run.encode(), part.encode(), b"\0", shard.peer.encode())


def _check(shard: Shard) -> None:
    """Raise DecodeError for values that no node writes. The peer's name becomes a file name."""
    public_key_of(shard.peer)
    if not all(_is_hex(text, DIGEST_BYTES) for text in (shard.run, shard.state, shard.blake3)):
        raise DecodeError("a digest has 64 lower-case hexadecimal digits")
    if not _is_hex(shard.signature, SIGNATURE_BYTES):
        raise DecodeError("a signature has 128 lower-case hexadecimal digits")
    _check_parts(shard.steps)
    if list(shard.left) != sorted(set(shard.left)) or any(expert < 0 for expert in shard.left):
        raise DecodeError("`left` must rise")
    if shard.round < 0 or not all(0 <= n < _MAX_COUNT for n in (shard.bytes, *shard.steps.values())):
        raise DecodeError("a count is outside its range")


def _check_parts(steps: Mapping[str, int]) -> None:
    for part in steps:
        if part != SHARED and not (part.isascii() and part.isdigit() and str(int(part[:9])) == part):
            raise DecodeError(f"{part[:20]!r} is no part of a model")


def _is_hex(text: str, size: int) -> bool:
    return len(text) == 2 * size and not text.strip("0123456789abcdef")


def shard_specs(
    model: ModelSpec, optimizer: Optimizer, trained: Collection[int], left: Collection[int]
) -> dict[str, Spec]:
    """Tensors of a member that trains these experts, and has something to say of those that it `left`."""
    found: dict[str, Spec] = {}
    for atom in atoms(model):
        expert = expert_of(atom.name)
        if expert is None or expert in trained:
            found[f"{WEIGHT}/{atom.name}"] = torch.int32, atom.shape
            found.update(_kept(atom, optimizer))
        elif expert in left:
            found[f"{ERROR}/{atom.name}"] = torch.float32, atom.shape
    return found


def moment_specs(model: ModelSpec, optimizer: Optimizer, number: int) -> dict[str, Spec]:
    """Names, dtypes and shapes of the tensors of a moments file."""
    mine = (atom for atom in atoms(model) if file_of(model, atom.name) == number)
    return {name: spec for atom in mine for name, spec in _kept(atom, optimizer)}


def is_optimised(name: str) -> bool:
    """Whether an atom has moments: a choice bias has none, no gradient moves it."""
    return not name.endswith(BIAS)


def is_valid(name: str, value: Tensor) -> bool:
    """Whether an honest optimiser can have made the tensor `KIND/ATOM` of a moments file."""
    kind = name.partition("/")[0]
    if kind == STEP:
        return bool(((value >= 0) & (value <= MAX_STEPS) & (value == value.round())).all())
    return all_finite(value) and (kind != "exp_avg_sq" or not bool((value < 0).any()))


def _kept(atom: Atom, optimizer: Optimizer) -> Iterator[tuple[str, Spec]]:
    yield f"{ERROR}/{atom.name}", (torch.float32, atom.shape)
    if is_optimised(atom.name):
        yield f"{STEP}/{atom.name}", (torch.float32, (1,))
        for moment in kinds_of(optimizer, atom.name):
            yield f"{moment}/{atom.name}", (torch.float32, atom.shape)
