"""Joins the shards of a run's members into a universal checkpoint (node/checkpoint/universal.py), and reads it.

Nothing in a folder is trusted. Sizes follow from the run; every file has the hash that its member signed; the
weights have the state digest that the voters of their round signed (node/daemon/certificates/certificate.py).
Joining needs shards of a quorum of the run's members, unless the user gives up what the others had not sent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3
from torch import Tensor

from atoll.node.checkpoint.disk import Piece, map_file, write_file
from atoll.node.checkpoint.tensorfile import TensorFile, all_finite, file_pieces, write_atom
from atoll.node.checkpoint.universal import (
    ERROR,
    JSON_MAX_BYTES,
    MOMENTS_NOTE,
    SHARED,
    STEP,
    WEIGHT,
    CheckpointManifest,
    Shard,
    check_signature,
    from_json,
    is_valid,
    joined,
    moment_specs,
    shard_specs,
    to_json,
)
from atoll.node.daemon.certificates.certificate import PROOF_MAX_BYTES, Proven, read_proof
from atoll.node.learning.outer.fixed import state_digest
from atoll.p2p.system.atomic_files import disk, read_whole
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import ConfigError, CorruptFault, DecodeError, PeerFault, SignatureFault
from atoll.protocols.ids import short
from atoll.protocols.run.arena import CHUNK, Arena, Placement, arena_of
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.run_spec import SAME_KEYS_VERSION, RunSpec, open_run

_MAKE: Final = "`atoll checkpoint save` writes one"
PIECE_BYTES = 16 << 20
RUN, VOTES, MANIFEST, TOKENIZER = "run", "votes", "manifest.json", "tokenizer.json"


def part_of(name: str) -> str:
    """The part of a checkpoint that an atom belongs to: SHARED, or the number of its expert."""
    expert = expert_of(name)
    return SHARED if expert is None else str(expert)


@dataclass
class ShardedCheckpoint:
    """A folder whose shards have one run, round and state, and hold every atom. Files are read on demand."""

    folder: Path
    spec: RunSpec
    manifest: CheckpointManifest
    proof: Proven
    """Proof that the checkpoint's round is final."""
    _files: dict[str, TensorFile] = field(default_factory=dict)

    @property
    def arena(self) -> Arena:
        """The arena of the run's model."""
        return arena_of(self.spec.model)

    def theta(self) -> Tensor:
        """Θ_final, int32 `[C, 4096]`. Raises ConfigError if shards differ or the digest is wrong."""
        theta_C4096 = torch.zeros((self.arena.chunks, CHUNK), dtype=torch.int32)
        for place in self.arena.placements:
            write_atom(theta_C4096, place, self._weight(place))
        if state_digest(theta_C4096).hex() != self.manifest.state:
            raise ConfigError(f"{self.folder}: the weights do not have the digest that the shards name")
        return theta_C4096

    def merged(self, name: str) -> Tensor:
        """The tensor `KIND/ATOM` of the moments files: Adam's state from the atom's holder, or the mean error.

        Raises ConfigError for values that no optimiser has.
        """
        kind, _, atom = name.partition("/")
        if kind == ERROR:
            return self._mean_error(name, part_of(atom))
        return self.checked(self.manifest.holders[part_of(atom)], name)

    def checked(self, peer: str, name: str) -> Tensor:
        """A tensor of a member's shard. Raises ConfigError for values that no optimiser has."""
        value = self.file_of(peer).read(name)
        if not is_valid(name, value):
            raise ConfigError(f"{self.folder}: {name} of …{peer[-8:]} is not finite, or out of range")
        return value

    def moments(self, number: int) -> Iterator[Piece]:
        """The bytes of moments file `number`, in pieces."""
        return file_pieces(
            moment_specs(self.spec.model, self.spec.inner.optimizer, number), MOMENTS_NOTE, self.merged
        )

    def _weight(self, place: Placement) -> Tensor:
        part, name = part_of(place.name), f"{WEIGHT}/{place.name}"
        value = self.file_of(self.manifest.holders[part]).read(name)
        for shard in self.manifest.shards:
            if part in shard.steps and not torch.equal(self.file_of(shard.peer).read(name), value):
                raise ConfigError(f"{self.folder}: two shards have other weights for {place.name}")
        return value

    def _mean_error(self, name: str, part: str) -> Tensor:
        """The sum of all members' error feedback, divided by the number of members that train the part.

        An update is a mean over its senders. If any number of members continue with this mean, together they send
        what these members together had not sent.
        """
        total = torch.zeros(())
        for shard in self.manifest.shards:
            if name in self.file_of(shard.peer).names:
                total = total + self.file_of(shard.peer).read(name).double()
        mean = (total / sum(part in shard.steps for shard in self.manifest.shards)).float()
        if not all_finite(mean):
            raise ConfigError(f"{self.folder}: {name} holds NaN or infinity")
        return mean

    def file_of(self, peer: str) -> TensorFile:
        """The opened tensors' file of a member that has a shard."""
        if peer not in self._files:
            shard = next(shard for shard in self.manifest.shards if shard.peer == peer)
            spec = self.spec
            specs = shard_specs(spec.model, spec.inner.optimizer, shard.experts, shard.left)
            self._files[peer] = TensorFile(self.folder / shard.file, specs, shard.note)
        return self._files[peer]


def join_shards(
    folder: Path, *, without_quorum: bool = False, report: Callable[[int, int], None] = lambda done, of: None
) -> ShardedCheckpoint:
    """Check the shards in a folder, then write its manifest. Raises ConfigError, DiskFault.

    `without_quorum` is for members that are gone for good: what they had not sent is given up. `report` is told
    how many of how many bytes are verified.
    """
    if (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} is joined already", hint="a checkpoint is not changed any more")
    spec, shards = _read_run(folder), _read_shards(folder)
    manifest, proof = _manifest_of(folder, spec, shards)
    if not manifest.quorum and not without_quorum:
        raise ConfigError(
            f"{folder}: signed by {len(proof.members) - len(manifest.absent)} of the {len(proof.members)} "
            f"members of the newest rounds, a quorum is {proof.needed}: there is no shard of "
            + ", ".join(f"…{short(peer)}" for peer in manifest.absent),
            hint="add their shards; or give up what they had not sent: --without-quorum",
        )
    data = to_json(manifest)
    if len(data) > JSON_MAX_BYTES:
        raise ConfigError(f"{folder}: a manifest of {len(data)} bytes, more than {JSON_MAX_BYTES}")
    found = _verified(ShardedCheckpoint(folder, spec, manifest, proof), report)
    write_file(folder / MANIFEST, [data])
    return found


def open_checkpoint(folder: Path, report: Callable[[int, int], None] = lambda done, of: None) -> ShardedCheckpoint:
    """Open and verify a joined checkpoint. Raises ConfigError, DiskFault.

    `report` is told how many of how many bytes are verified.
    """
    spec, manifest = described(folder)
    expected, proof = _manifest_of(folder, spec, manifest.shards)
    if expected != manifest:
        raise ConfigError(f"{folder / MANIFEST} is not what its shards say")
    return _verified(ShardedCheckpoint(folder, spec, manifest, proof), report)


def described(folder: Path) -> tuple[RunSpec, CheckpointManifest]:
    """The run and the manifest of a joined checkpoint; nothing is verified. Raises ConfigError, DiskFault."""
    data = read_whole(folder / MANIFEST, max_bytes=JSON_MAX_BYTES)
    if data is None:
        raise ConfigError(f"{folder} has no {MANIFEST}", hint="join its shards first: atoll checkpoint join DIR")
    spec = _read_run(folder)
    try:
        return spec, from_json(data, CheckpointManifest)
    except DecodeError as error:
        raise ConfigError(f"{folder / MANIFEST}: {error}") from error


def _manifest_of(folder: Path, spec: RunSpec, shards: Sequence[Shard]) -> tuple[CheckpointManifest, Proven]:
    """The manifest of these shards and the proof of their round. Raises ConfigError if a check fails."""
    data = read_whole(folder / VOTES, max_bytes=PROOF_MAX_BYTES)
    if data is None:
        raise ConfigError(
            f"{folder} has no file `{VOTES}`", hint="copy what `atoll checkpoint save` wrote, all of it"
        )
    proof = read_proof(spec, data, folder / VOTES)
    manifest = joined(shards, spec.model.expert_count, blake3(data).hexdigest(), proof.members, proof.needed)
    if manifest.run != spec.id.hex():
        raise ConfigError(f"{folder}: the shards are of another run than the file `{RUN}`")
    if (manifest.round, manifest.state) != (proof.round, proof.state.hex()):
        raise ConfigError(
            f"{folder}: the shards are of round {manifest.round}, state {manifest.state[:16]}; "
            f"voted was for round {proof.round}, state {proof.state.hex()[:16]}"
        )
    for shard in shards:
        _check_member(folder, shard, proof)
    return manifest, proof


def _check_member(folder: Path, shard: Shard, proof: Proven) -> None:
    json_path = (folder / shard.file).with_suffix(".json")
    try:
        check_signature(shard)
    except SignatureFault as error:
        raise ConfigError(f"{json_path} is not what …{short(shard.peer)} signed") from error
    if shard.peer not in proof.known:
        raise ConfigError(
            f"…{short(shard.peer)} is in no final set of the run up to round {proof.round}",
            hint="take its shard away: nobody knows it as a member",
        )


def _verified(checkpoint: ShardedCheckpoint, report: Callable[[int, int], None]) -> ShardedCheckpoint:
    """Check hash, header and step counts of every file, and the digest of Θ. Raises ConfigError."""
    done, whole = 0, sum(shard.bytes for shard in checkpoint.manifest.shards)
    for shard in checkpoint.manifest.shards:
        for size in _checked_file(checkpoint.folder / shard.file, shard):
            done += size
            report(done, whole)
        try:
            file = checkpoint.file_of(shard.peer)
        except DecodeError as error:
            raise ConfigError(f"{checkpoint.folder}: {error}") from error
        for name in file.names:
            kind, _, atom = name.partition("/")
            if kind == STEP and float(file.read(name)) != shard.steps.get(part_of(atom)):
                raise ConfigError(f"{checkpoint.folder / shard.file}: {name} is not the count that its words name")
    checkpoint.theta()
    return checkpoint


def _checked_file(path: Path, shard: Shard) -> Iterator[int]:
    """Hash a file piece by piece; the bytes of each piece. Raises ConfigError where the hash is another."""
    if not path.is_file():
        raise ConfigError(f"{path} is missing", hint="copy the shard whole, both of its files")
    with disk(path):
        data = map_file(path)
    found = blake3()
    for begin in range(0, len(data), PIECE_BYTES):
        found.update(data[begin : begin + PIECE_BYTES])
        yield len(data[begin : begin + PIECE_BYTES])
    if len(data) != shard.bytes or found.hexdigest() != shard.blake3:
        raise ConfigError(f"{path} does not have the hash that its words name", hint="copy it again, whole")


def _read_shards(folder: Path) -> list[Shard]:
    with disk(folder):
        paths = sorted(path for path in folder.glob("*.json") if path.name not in (MANIFEST, TOKENIZER))
    found = []
    for path in paths:
        data = read_whole(path, max_bytes=JSON_MAX_BYTES)
        try:
            shard = from_json(data or b"", Shard)
        except DecodeError as error:
            raise ConfigError(f"{path} is not the words of a shard: {error}") from error
        if path.stem != shard.peer:
            raise ConfigError(f"{path} is of …{shard.peer[-8:]}: somebody renamed it")
        found.append(shard)
    return found


def _read_run(folder: Path) -> RunSpec:
    try:
        data = read_whole(folder / RUN, max_bytes=MESSAGE_MAX_BYTES)
        if data is None:
            raise ConfigError(f"{folder} is no checkpoint: it has no file `{RUN}`", hint=_MAKE)
        return open_run(data, oldest=SAME_KEYS_VERSION)
    except (PeerFault, CorruptFault) as error:
        raise ConfigError(f"{folder / RUN} is not a run that this program knows: {error}") from error
