"""What a member begins with that goes on from a checkpoint, compared with the checkpoint bit by bit."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.checkpoint.snapshot import read_snapshot
from atoll.node.checkpoint.tensorfile import read_atom
from atoll.node.checkpoint.universal import ERROR, WEIGHT
from atoll.node.import_export.join_shards import ShardedCheckpoint
from atoll.node.learning.compress.codecs import OnHost
from atoll.node.learning.model.bridge import named_atoms
from atoll.node.learning.outer.fixed import state_digest, to_float
from atoll.node.worker.error_feedback import ErrorFeedback
from atoll.node.worker.initial_moments import InitialMoments
from atoll.node.worker.learner import Learner
from atoll.p2p.blobs.store import BLOBS, blob_path
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec


def differing(checkpoint: ShardedCheckpoint, spec: RunSpec, run_folder: Path, experts: bytes) -> list[str]:
    """Names of values that a member of the run `spec` has otherwise, if it trains these experts; its whole model,
    and moments and error feedback of what it trains. The run's files are in its blob store below `run_folder`.
    """
    assert spec.start
    blobs = run_folder / BLOBS
    theta_C4096 = read_snapshot(blob_path(blobs, spec.start.weights), checkpoint.arena, state_digest).theta_C4096
    learner, sending = Learner(spec, "cpu"), ErrorFeedback(spec, run_folder / "spool", OnHost())
    learner.set_trained_experts(experts)
    paths = tuple(str(blob_path(blobs, blob)) for blob in spec.start.moment_blobs)
    InitialMoments(spec, paths).load_into(learner, sending)
    learner.weights.start(theta_C4096)
    begun = dict(_begun(learner, sending, spec))
    said = checkpoint.theta()
    places = {place.name: place for place in checkpoint.arena.placements}
    found = []
    for name, value in begun.items():
        kind, _, atom = name.partition("/")
        wanted = to_float(read_atom(said, places[atom])) if kind == WEIGHT else checkpoint.merged(name)
        if not torch.equal(value, wanted):
            found.append(name)
    return found


def _begun(learner: Learner, sending: ErrorFeedback, spec: RunSpec) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"{WEIGHT}/{atom}", value) for atom, value in named_atoms(learner.module).items())
    yield from learner.inner.state().items()
    trained = learner.weights.trained()
    for place in arena_of(spec.model).placements:
        if place.name in trained:
            yield f"{ERROR}/{place.name}", read_atom(sending.residual_C4096, place)
