"""Puts a node back into a run that others still train: its state as a checkpoint has it, as if it was saved then.

Who has a shard in it goes on with its own moments, its experts, and what it had not said. Anybody else takes what
is no expert's, or what everybody trains, with the moments that count for it, and has nothing unsaid. What happened
since, the node gets from the others; what is here says where it starts.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.checkpoint.atoms import write_atom
from atoll.node.checkpoint.local import LocalBody, begin_local, load_local
from atoll.node.checkpoint.shards import ERROR, STEP, WEIGHT, is_optimised
from atoll.node.checkpoint.universal import SHARED, Shard
from atoll.node.daemon.feed_recovery import mark, marked
from atoll.node.import_export.export_run import BLOBS, STATE
from atoll.node.import_export.join_shards import TOKENIZER, ShardedCheckpoint
from atoll.p2p.blobs.store import BlobStore
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.system.atomic_files import make_folder, read_whole
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.moments import KINDS
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES


class Restored(NamedTuple):
    """What a node starts with."""

    round: int
    state: str
    own: bool
    """It has a shard of its own: its moments, and what it had not said."""
    feed: bool
    """Its feed is here: it need not wait for others that have it."""


def restore(checkpoint: ShardedCheckpoint, run_folder: Path, me: PeerId) -> Restored:
    """Write the state of `me` below the folder of its run. No node may run there.

    Where its feed is lost too, the folder is marked (node/daemon/feed_recovery.py). Raises ConfigError where
    there is a
    state already, CorruptFault for a damaged mark, DiskFault; then nothing that counts is there.
    """
    spec, manifest = checkpoint.spec, checkpoint.manifest
    _check_empty(checkpoint, run_folder)
    own = next((shard for shard in manifest.shards if shard.peer == me), None)
    tensors = dict(_own(checkpoint, own) if own is not None else _newcomers(checkpoint))
    residual_C4096 = torch.zeros((checkpoint.arena.chunks, CHUNK))
    for place in checkpoint.arena.placements:
        error = tensors.pop(f"{ERROR}/{place.name}", None)
        if error is not None:
            write_atom(residual_C4096, place, error)
    steps = own.steps[SHARED] if own is not None else 0
    state = Digest(bytes.fromhex(manifest.state))
    body = LocalBody(spec.id, manifest.round, state, steps, ())
    make_folder(run_folder)
    _bring_tokenizer(checkpoint, run_folder)
    entries = checkpoint.proof.entries.get(me, 0)
    has_feed = _has_feed(run_folder, spec.id, me, entries)
    if not has_feed:
        mark(run_folder, entries, {*manifest.members} - {me})  # before there is a state to start with
    whole = {"final": checkpoint.theta(), "residual": residual_C4096, **tensors}
    begin_local(run_folder / STATE, body, whole).finish()
    return Restored(manifest.round, manifest.state, own is not None, has_feed)


def _has_feed(run_folder: Path, run: RunId, me: PeerId, entries: int) -> bool:
    """Whether only the state was lost: the ledger is whole, and nobody waits for more of it."""
    if marked(run_folder) is not None or not (run_folder / LEDGER_FILE).exists():
        return False
    try:
        with closing(Ledger(run_folder / LEDGER_FILE, run)) as ledger:
            return ledger.vector().get(me, 0) >= max(entries, 1)
    except CorruptFault:
        return False


def _check_empty(checkpoint: ShardedCheckpoint, run_folder: Path) -> None:
    found = load_local(run_folder / STATE, checkpoint.spec.id)
    if found is not None:
        raise ConfigError(
            f"this home has the state of round {found.body.final} of {checkpoint.spec.name!r} already",
            hint=f"start the node, it catches up; to go back to round {checkpoint.manifest.round} all the same, "
            f"remove {run_folder / STATE}",
        )


def _own(checkpoint: ShardedCheckpoint, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(checkpoint.file_of(shard.peer).names):
        if not name.startswith(f"{WEIGHT}/"):
            yield name, checkpoint.sound(shard.peer, name)


def _newcomers(checkpoint: ShardedCheckpoint) -> Iterator[tuple[str, Tensor]]:
    for place in checkpoint.arena.placements:
        is_trained = not splits(checkpoint.spec) or expert_of(place.name) is None
        if is_trained and is_optimised(place.name):
            for kind in (STEP, *KINDS):
                name = f"{kind}/{place.name}"
                yield name, checkpoint.kept(name)


def _bring_tokenizer(checkpoint: ShardedCheckpoint, run_folder: Path) -> None:
    """Where the checkpoint has it; else the others do."""
    if checkpoint.spec.data.tokenizer == "file":
        data = read_whole(checkpoint.folder / TOKENIZER, max_bytes=TOKENIZER_MAX_BYTES)
        if data is not None:
            BlobStore(make_folder(run_folder / BLOBS)).add_bytes(data)
