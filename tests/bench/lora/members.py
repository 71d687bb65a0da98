"""Members of a run whose weights are given: as the frozen base of a LoRA run, or as the start of a whole one."""

from pathlib import Path
from typing import Any

import torch
from msgspec import UNSET
from msgspec.structs import replace
from torch import Tensor

from atoll.node.checkpoint.snapshot import Snapshot, write_snapshot
from atoll.node.checkpoint.tensorfile import write_atom
from atoll.node.learning.model.genesis import genesis_atom
from atoll.node.learning.outer.fixed import state_digest
from atoll.node.worker.session import Session
from atoll.protocols import codec
from atoll.protocols.blobs import manifest_of_file
from atoll.protocols.ids import Digest, Round, digest
from atoll.protocols.local.worker_messages import (
    AdoptRequest,
    EvaluateReply,
    EvaluateRequest,
    FinalizeReply,
    FinalizeRequest,
    FoldRequest,
    Member,
    Pending,
    SaveRequest,
    StartRequest,
    TrainReply,
    TrainRequest,
)
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.model_spec import ModelSpec, atoms
from atoll.protocols.run.run_spec import RunSpec, StartSpec
from atoll_bench.experts.experts_members import identity_of


def genesis_state(model: ModelSpec, seed: int) -> Tensor:
    """A model's first values, int32 `[C, 4096]`."""
    arena = arena_of(model)
    theta_C4096 = torch.zeros((arena.chunks, CHUNK), dtype=torch.int32)
    places = {place.name: place for place in arena.placements}
    for atom in atoms(model):
        write_atom(theta_C4096, places[atom.name], torch.from_numpy(genesis_atom(atom, model, seed)))
    return theta_C4096


def write_given(path: Path, model: ModelSpec, theta_C4096: Tensor) -> StartSpec:
    """Write weights as a run is given them; their names in its spec."""
    state = state_digest(theta_C4096)
    write_snapshot(path, Snapshot(theta_C4096, -1, state), arena_of(model))
    with path.open("rb") as file:
        return StartSpec(weights=manifest_of_file(file).id, state=state)


def given(spec: RunSpec, start: StartSpec, rank: int) -> RunSpec:
    """The run on these weights; `rank` 0: all of them are trained."""
    if not rank:
        return replace(spec, start=start)
    return replace(spec, model=replace(spec.model, lora_rank=rank), base=start.weights, start=UNSET)


class GivenMembers:
    """Workers of one run, which train and fold in turns; nobody sends anything."""

    def __init__(
        self, folder: Path, spec: RunSpec, weights: Path, count: int, text: str = "", **more: Any
    ) -> None:
        """`weights`: of `write_given`. `more`: of StartRequest."""
        self.spec = spec
        self.homes = [folder / f"member-{number}" for number in range(count)]
        self._peers = [identity_of(number).peer_id for number in range(count)]
        self.sessions: list[Session] = []
        for home, peer in zip(self.homes, self._peers, strict=True):
            start = StartRequest(
                codec.encode(spec),
                peer,
                str(home),
                text,
                1,
                "cpu",
                base=str(weights) if spec.base else "",
                exchange_on="host",
                **more,
            )
            self.sessions.append(Session(start))
            if spec.start:
                self.sessions[-1].answer(AdoptRequest(Round(-1), str(weights), spec.start.state, ()))

    def round(self, number: int) -> Digest:
        """Train, fold and finalize a round on all; the one digest."""
        sent = [self._trained(slot, number) for slot in range(len(self.sessions))]
        members = tuple(
            Member(digest(peer.encode(), one.payload), peer, one.weight, one.payload, one.path)
            for peer, one in zip(self._peers, sent, strict=True)
        )
        self.payload_bytes = [Path(one.path).stat().st_size for one in sent]
        states = set()
        for session in self.sessions:
            session.answer(FoldRequest(Round(number), members))
            reply = session.answer(FinalizeRequest(Round(number), members))
            assert isinstance(reply, FinalizeReply)
            states.add(reply.state)
        (state,) = states
        return state

    def loss(self) -> float:
        """Validation loss of the shared weights, nats per token."""
        found = self.sessions[0].answer(EvaluateRequest())
        assert isinstance(found, EvaluateReply)
        return found.val_loss

    def _trained(self, slot: int, number: int) -> Pending:
        session = self.sessions[slot]
        ask = TrainRequest(Round(number), slot, len(self.sessions), self.spec.steps(number), -1)
        *_, trained = session.train(ask)
        assert isinstance(trained, TrainReply)
        while session.finish_save(SaveRequest(Round(number))) is None:
            pass
        return trained.pending
