"""Restores a node of a run that others still train: writes its state as a checkpoint has it.

A node with a shard continues with its own moments, its experts and its error feedback. Any other node gets the
atoms that everybody trains, with the moments of their holders and no error feedback. What happened in the run
since then, the node fetches from its peers.
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.node.checkpoint.local import LocalBody, begin_local, load_local
from atoll.node.checkpoint.tensorfile import write_atom
from atoll.node.checkpoint.universal import ERROR, SHARED, STEP, WEIGHT, Shard, is_optimised
from atoll.node.daemon.assets.feed_recovery import mark_restored, read_mark
from atoll.node.import_export.export_run import STATE
from atoll.node.import_export.join_shards import TOKENIZER, ShardedCheckpoint
from atoll.p2p.blobs.store import BLOBS, BlobStore
from atoll.p2p.ledger.store import LEDGER_FILE, Ledger
from atoll.p2p.system.atomic_files import make_folder, read_whole
from atoll.protocols.errors import ConfigError, CorruptFault
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.ledger.ownership import splits
from atoll.protocols.run.arena import CHUNK
from atoll.protocols.run.model_spec import expert_of
from atoll.protocols.run.moments import kinds_of
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES


class Restored(NamedTuple):
    """What a restored node starts with."""

    round: int
    state: str
    own: bool
    """Whether it has a shard of its own: its moments and its error feedback."""
    feed: bool
    """Whether its feed is here, so that it need not wait for peers that have it."""


def restore_node(checkpoint: ShardedCheckpoint, run_folder: Path, me: PeerId) -> Restored:
    """Write the state of `me` below the folder of its run. No node may run there.

    If its feed is lost too, the folder is marked (node/daemon/assets/feed_recovery.py). Raises ConfigError if
    there is a state already, CorruptFault for a damaged mark, DiskFault; then no state is written.
    """
    spec, manifest = checkpoint.spec, checkpoint.manifest
    _check_empty(checkpoint, run_folder)
    own = next((shard for shard in manifest.shards if shard.peer == me), None)
    tensors = dict(_own_tensors(checkpoint, own) if own is not None else _shared_moments(checkpoint))
    residual_C4096 = torch.zeros((checkpoint.arena.chunks, CHUNK))
    for place in checkpoint.arena.placements:
        error = tensors.pop(f"{ERROR}/{place.name}", None)
        if error is not None:
            write_atom(residual_C4096, place, error)
    steps = own.steps[SHARED] if own is not None else 0
    state = Digest(bytes.fromhex(manifest.state))
    body = LocalBody(spec.id, manifest.round, state, steps, (), author=me)
    make_folder(run_folder)
    _store_tokenizer(checkpoint, run_folder)
    entries = checkpoint.proof.entries.get(me, 0)
    has_feed = _has_feed(run_folder, spec.id, me, entries)
    if not has_feed:
        mark_restored(
            run_folder, entries, {*manifest.members} - {me}, me
        )  # before a state that could be started without it
    whole = {"final": checkpoint.theta(), "residual": residual_C4096, **tensors}
    begin_local(run_folder / STATE, body, whole).finish()
    return Restored(manifest.round, manifest.state, own is not None, has_feed)


def _has_feed(run_folder: Path, run: RunId, me: PeerId, entries: int) -> bool:
    """Whether only the state was lost: the ledger holds the node's whole feed, and no mark waits for more."""
    if read_mark(run_folder, me) is not None or not (run_folder / LEDGER_FILE).exists():
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


def _own_tensors(checkpoint: ShardedCheckpoint, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    for name in sorted(checkpoint.file_of(shard.peer).names):
        if not name.startswith(f"{WEIGHT}/"):
            yield name, checkpoint.checked(shard.peer, name)


def _shared_moments(checkpoint: ShardedCheckpoint) -> Iterator[tuple[str, Tensor]]:
    for place in checkpoint.arena.placements:
        is_trained = not splits(checkpoint.spec) or expert_of(place.name) is None
        if is_trained and is_optimised(place.name):
            for kind in (STEP, *kinds_of(checkpoint.spec.inner.optimizer, place.name)):
                name = f"{kind}/{place.name}"
                yield name, checkpoint.merged(name)


def _store_tokenizer(checkpoint: ShardedCheckpoint, run_folder: Path) -> None:
    """Put the checkpoint's tokenizer into the blob store; if it has none, peers have it."""
    if checkpoint.spec.data.tokenizer == "file":
        data = read_whole(checkpoint.folder / TOKENIZER, max_bytes=TOKENIZER_MAX_BYTES)
        if data is not None:
            BlobStore(make_folder(run_folder / BLOBS)).add_bytes(data)
