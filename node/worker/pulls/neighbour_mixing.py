"""Between two inner steps of a round: tell a neighbour what was trained so far, and mix what a neighbour trained.

The contribution remains A − L (local_weights.py), with the mixed-in work of neighbours in L; the error feedback
does not take part. Mixing needs one more array of the model's size, for the neighbour's difference.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.compress.codecs import Encoder, codec_of
from atoll.node.learning.outer.fixed import Padding, clear, padding_of
from atoll.node.learning.outer.pairwise import mixed, share_of
from atoll.node.worker.local_weights import SLAB_CHUNKS, LocalWeights
from atoll.p2p.system.atomic_files import disk
from atoll.protocols.ids import Round
from atoll.protocols.ledger.coverage import slabs, trained_cover
from atoll.protocols.pulls.requests import DifferenceReply, DifferenceRequest, MixReply, MixRequest
from atoll.protocols.run.arena import CHUNK, arena_of
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.variants.gossip import GossipSpec

NO_ROUND = -1


@dataclass(kw_only=True, slots=True)
class NeighbourMixing:
    """Knows the round at hand, and the payload of the newest trained one."""

    spec: RunSpec
    gossip: GossipSpec
    encoder: Encoder
    padding: Padding
    at_hand: int = NO_ROUND
    pulls: int = 0
    """Differences that were mixed in the round at hand."""
    newest: tuple[int, bytes | bytearray] = (NO_ROUND, b"")
    """The newest trained round and its payload: a slower neighbour may still pull it."""

    def begin(self, number: Round) -> None:
        """A round begins."""
        self.at_hand, self.pulls, self.newest = number, 0, (NO_ROUND, b"")

    def end(self, number: Round, payload: bytes | bytearray) -> None:
        """Its contribution is encoded; no neighbour changes it any more."""
        self.at_hand, self.newest = NO_ROUND, (number, payload)

    def is_reported(self, step: int) -> bool:
        """Whether the daemon must know that this step of the round is done: it is the first one, or a tick."""
        return step == 1 or step % self.gossip.steps == 0

    def write(self, ask: DifferenceRequest, weights: LocalWeights) -> DifferenceReply:
        """Answer a difference request. Raises DiskFault."""
        payload = self.newest[1] if ask.round == self.newest[0] else None
        if ask.round == self.at_hand:
            payload = self._difference(weights)
        if payload is not None:
            with disk(Path(ask.path)):  # without fsync: what a crash loses is one tick of a neighbour
                Path(ask.path).write_bytes(payload)
        return DifferenceReply(payload is not None)

    def mix(self, ask: MixRequest, weights: LocalWeights) -> MixReply:
        """Answer a mix request. Raises DecodeError."""
        if ask.round != self.at_hand:
            return MixReply(False)
        chunks = arena_of(self.spec.model).chunks
        theirs_C4096 = torch.zeros((chunks, CHUNK))
        # Checks each code and scale before it adds: what is no payload of the run raises DecodeError.
        codec_of(self.spec.compress.codec, self.spec.compress.k).give_back(theirs_C4096, map_payload(ask.path))
        clear(theirs_C4096, self.padding)
        share = share_of(self._square(weights), float(theirs_C4096.double().square().sum()))
        weights.changes += 1
        for _, span in slabs(trained_cover(self.spec.model, b""), SLAB_CHUNKS):
            rows = slice(span.start, span.stop)
            anchor = weights.anchor_C4096[rows]
            weights.replace_rows(span, mixed(weights.rows(span), anchor, theirs_C4096[rows].to(anchor), share))
        self.pulls += 1
        return MixReply(True)

    def _difference(self, weights: LocalWeights) -> bytearray | None:
        """Payload of A − L; None if L is not finite, which the end of the round reports."""
        cover = trained_cover(self.spec.model, b"")
        codec = codec_of(self.spec.compress.codec, self.spec.compress.k)
        payload = self.encoder.begin(codec.layout(arena_of(self.spec.model).chunks))
        for at, span in slabs(cover, max(1, self.encoder.slab_chunks)):
            local, anchor = weights.rows(span), weights.anchor_C4096[span.start : span.stop]
            if not self.encoder.is_sound(local):
                return None
            # The encoder adds a difference of weights to what it encodes: here of equal ones, which is 0.
            payload.fill(at, anchor - local, anchor, anchor, 1.0)
        return payload.whole()

    def _square(self, weights: LocalWeights) -> float:
        """‖A − L‖² over all that is trained."""

        def square(rows_N4096: Tensor, start: int) -> float:
            anchor = weights.anchor_C4096[start : start + len(rows_N4096)]
            return float((anchor - rows_N4096).double().square().sum())

        cover = trained_cover(self.spec.model, b"")
        return sum(square(weights.rows(span), span.start) for _, span in slabs(cover, SLAB_CHUNKS))


def mixing_of(spec: RunSpec, encoder: Encoder) -> NeighbourMixing | None:
    """The mixing of a run; None without gossip."""
    gossip = spec.outer.gossip
    if not gossip:
        return None
    padding = padding_of(arena_of(spec.model))
    return NeighbourMixing(spec=spec, gossip=gossip, encoder=encoder, padding=padding)
