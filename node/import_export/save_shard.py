"""Writes a member's shard of a universal checkpoint from its worker's state and its ledger. No node may run."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace
from torch import Tensor

from atoll.node.checkpoint.disk import Piece, write_file
from atoll.node.checkpoint.local import LOCAL, LocalState, saved_anchor
from atoll.node.checkpoint.tensorfile import file_pieces, read_atom
from atoll.node.checkpoint.universal import (
    ERROR,
    SHARED,
    STEP,
    VERSION,
    WEIGHT,
    Shard,
    shard_specs,
    signed,
    to_json,
)
from atoll.node.daemon.certificates.certificate import PROOF_MAX_BYTES, gather, read_proof
from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.import_export.export_run import STATE, load_saved, tokenizer_json
from atoll.node.import_export.join_shards import RUN, TOKENIZER, VOTES, part_of
from atoll.node.learning.compress.codecs import OnHost
from atoll.node.learning.inner.quantized import saved_moment
from atoll.node.learning.reduction.reducing import ReducerErrorFeedback, hand_back
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.p2p.blobs.store import BLOBS
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.system.atomic_files import disk, make_folder, read_whole
from atoll.protocols.codec import MESSAGE_MAX_BYTES
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.identity import Identity
from atoll.protocols.ids import PeerId
from atoll.protocols.run.arena import Placement, arena_of
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.run_spec import RunSpec, open_run
from atoll.protocols.run.sections.zeroth_order import is_scalar

_ALL = 1 << 40
"""More entries than any ledger holds."""
_FAR = 1 << 62
"""A round number later than any round."""


def save_shard(
    run_file: bytes,
    run_folder: Path,
    identity: Identity,
    to: Path,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Shard:
    """Write this node's shard into a folder that may hold other nodes' shards; its signed JSON comes last.

    `run_file` is the signed run. `report` is told how many of how many tensors are written. Raises ConfigError,
    CorruptFault, DiskFault, LocalFault while the node runs; then nothing of this node is there.
    """
    spec = open_run(run_file)
    if spec.outer.momenta or spec.compress.sizes:
        what = f"the momentum of outer.rule {spec.outer.rule}" if spec.outer.momenta else "compress.sizes"
        raise ConfigError(
            f"shards have no place for {what}",
            hint="export the weights: atoll model export",
        )
    if is_scalar(spec):
        raise ConfigError(
            "a run with inner.optimizer spsa has no moments to save beside its weights",
            hint="export them: atoll model export; and start from them: atoll run new NAME --from-hf DIR",
        )
    if spec.base:
        raise ConfigError("shards have no place for the base of a LoRA run", hint="export it: atoll model export")
    found = load_saved(spec, run_folder)
    if found is None:
        raise ConfigError(f"there is no state of {spec.name!r} in this home yet", hint="train first")
    steps = _steps(found.tensors)
    if SHARED not in steps:
        raise ConfigError(f"this node has not trained in {spec.name!r} yet")
    if found.body.final < 0:
        raise ConfigError(f"no round of {spec.name!r} is final here yet", hint="wait for one: atoll status")
    votes = _votes(spec, run_folder, found, identity.peer_id, to)
    unsent_C4096 = _unsent(spec, run_folder, found)
    trained = frozenset(int(part) for part in steps if part != SHARED)
    draft = Shard(
        version=VERSION,
        run=spec.id.hex(),
        round=found.body.final,
        state=found.body.state.hex(),
        peer=identity.peer_id,
        steps=steps,
        left=_left(spec, unsent_C4096, trained),
        bytes=0,
        blake3="",
        signature="",
    )
    make_folder(to)
    _store_run(to, spec, run_file, run_folder)
    _store_votes(to, spec, votes)
    specs = shard_specs(spec.model, spec.inner.optimizer, trained, draft.left)
    values, numbers = _values(spec, found, unsent_C4096), itertools.count(1)

    def read(name: str) -> Tensor:
        report(next(numbers), len(specs))
        return values(name)

    return _write_shard(to, draft, identity, file_pieces(specs, draft.note, read))


def _votes(spec: RunSpec, run_folder: Path, found: LocalState, me: PeerId, to: Path) -> bytes:
    """Proof from the ledger that the saved round is final with the saved state. Raises CorruptFault, ConfigError.

    `to`: where another node may have stored one: a ledger that was cut proves nothing.
    """
    path, number = run_folder / LEDGER_FILE, found.body.final
    if not path.exists():
        raise ConfigError(f"the ledger of {spec.name!r} is not in this home", hint="start the node: it fetches it")
    ledger = Ledger(path, spec.id)
    try:
        if ledger.history.summary is not None:
            return _votes_of_others(spec, found, to)
        feeds = ((entry.author, entry.body) for _, entry in ledger.since(0, _ALL))
        orphans = ((entry.author, entry.body) for entry in ledger.orphans())
        data = gather(
            spec,
            number,
            lambda at: ledger.entries(number=at),
            chosen_path(feeds, me, orphans),
            orphans_of=ledger.orphans,
            equivocators=ledger.equivocators(),
        )
    finally:
        ledger.close()
    if read_proof(spec, data, path).state != found.body.state:
        raise CorruptFault(f"{run_folder / STATE}: the weights are not those that round {number} is final with")
    return data


def _votes_of_others(spec: RunSpec, found: LocalState, to: Path) -> bytes:
    """The proof of this round that another node stored in the folder. Raises ConfigError."""
    there = read_whole(to / VOTES, max_bytes=PROOF_MAX_BYTES)
    proof = read_proof(spec, there, to / VOTES) if there is not None else None
    if there is None or proof is None or (proof.round, proof.state) != (found.body.final, found.body.state):
        raise ConfigError(
            "this node keeps recent records only (ledger_history), and cannot prove that its round is final",
            hint=f"save on a node that keeps all records first, and copy its {VOTES} into {to}",
        )
    return there


def _store_votes(to: Path, spec: RunSpec, votes: bytes) -> None:
    """Write the proof if the folder has none: nodes may have different quorums of votes, and one is enough."""
    path = to / VOTES
    there = read_whole(path, max_bytes=PROOF_MAX_BYTES)
    if there is None:
        write_file(path, [votes])
    elif there != votes and read_proof(spec, there, path).round != read_proof(spec, votes, path).round:
        raise ConfigError(f"{to} holds a checkpoint of another round", hint="choose another folder")


def _write_shard(to: Path, draft: Shard, identity: Identity, pieces: Iterable[Piece]) -> Shard:
    path = to / draft.file
    json_path = path.with_suffix(".json")
    if json_path.exists() or path.exists():
        raise ConfigError(f"{path} is there already", hint="choose another folder, or remove both of its files")
    size, hashed = write_file(path, pieces)
    shard = signed(replace(draft, bytes=size, blake3=hashed.hex()), identity)
    try:
        write_file(json_path, [to_json(shard)])
    except BaseException:
        with disk(path):
            path.unlink(missing_ok=True)
        raise
    return shard


def _store_run(to: Path, spec: RunSpec, run_file: bytes, run_folder: Path) -> None:
    """Write the run and its tokenizer; if they are there already, they must be the same."""
    files = {RUN: run_file}
    if spec.data.tokenizer == "file":
        files[TOKENIZER] = tokenizer_json(spec.data, "", run_folder / BLOBS).encode()
    for name, data in files.items():
        there = read_whole(to / name, max_bytes=max(MESSAGE_MAX_BYTES, len(data)))
        if there is None:
            write_file(to / name, [data])
        elif there != data:
            raise ConfigError(f"{to} holds the checkpoint of another run", hint="choose another folder")


def _steps(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Parts -> Adam's steps with them. All atoms of a part have the same count."""
    found: dict[str, int] = {}
    for name, value in tensors.items():
        kind, _, atom = name.partition("/")
        if kind == STEP:
            found[part_of(atom)] = max(int(value), found.get(part_of(atom), 0))
    return found


def _unsent(spec: RunSpec, run_folder: Path, found: LocalState) -> Tensor:
    """Error feedback plus what is on its way: payloads of rounds that are not final, and a reducer's residual.

    The weights are those of the final round, so whatever they lack counts as unsent.
    """
    sending = ErrorFeedback(spec, run_folder / "spool", OnHost())
    sending.load(found.tensors["residual"], found.body)
    sending.close_rounds(_FAR, sending.missed(_FAR, {}, {}))
    for body in found.body.kept[:1]:  # what follows is what it began with
        hand_back(sending.residual_C4096, ReducerErrorFeedback(body.span, found.tensors["kept"]))
    return sending.residual_C4096


def _values(spec: RunSpec, found: LocalState, unsent_C4096: Tensor) -> Callable[[str], Tensor]:
    places = {place.name: place for place in arena_of(spec.model).placements}
    tensors = found.tensors

    def value_of(name: str) -> Tensor:
        kind, _, atom = name.partition("/")
        if kind == WEIGHT:
            return read_atom(tensors["final"], places[atom])
        if kind == ERROR:
            return _error(places[atom], tensors, unsent_C4096)
        return tensors[name] if kind == STEP else saved_moment(tensors, kind, atom, places[atom].shape)

    return value_of


def _error(place: Placement, tensors: Mapping[str, Tensor], unsent_C4096: Tensor) -> Tensor:
    """Error feedback of an atom, with the local progress since the anchor that a later round would send."""
    error, local = read_atom(unsent_C4096, place), tensors.get(LOCAL + place.name)
    return error if local is None else error + (saved_anchor(tensors, place) - local)


def _left(spec: RunSpec, unsent_C4096: Tensor, trained: frozenset[int]) -> tuple[int, ...]:
    """Experts that are no longer trained here but have unsent error feedback, in rising order."""
    found: set[int] = set()
    for place in arena_of(spec.model).placements:
        expert = expert_of(place.name)
        if expert is not None and expert not in trained | found and bool(read_atom(unsent_C4096, place).any()):
            found.add(expert)
    return tuple(sorted(found))
