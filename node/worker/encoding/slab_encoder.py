"""Local weights into a payload, slab by slab, by all threads of an encoder: what is added to them before and kept
after is the run's rule of the error feedback."""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from atoll.node.learning.compress.blocks import Blocks
from atoll.node.learning.compress.codecs import Encoder, UnfinishedPayload
from atoll.node.learning.compress.feedback.memory import FeedbackRule
from atoll.node.learning.outer.fixed import Padding, clear
from atoll.node.worker.local_weights import LocalWeights
from atoll.node.worker.sizes.payload import SizedPayload
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.ledger.coverage import Cover, cut_in, size_of, slabs
from atoll.protocols.run.arena import CHUNK, Arena
from atoll.protocols.run.payload import Layout
from atoll.protocols.run.sized_payload import SizedLayout

T = TypeVar("T")
Work = Callable[[int, Cover, Tensor | Blocks], T]
"""Is given a slab: its first row in the payload, its chunks (one span of rows), its local weights."""


class _Slab(NamedTuple):
    """Chunks that are encoded at once."""

    at: int
    """Their first row in the payload."""
    cover: Cover
    blocks: Blocks | None
    """Their local weights where these stand; None: they are copied."""


@dataclass(frozen=True, slots=True)
class SlabEncoder:
    """Encodes rounds of one run. `rule`: None for the plain error feedback with the decay `feedback`."""

    encoder: Encoder
    arena: Arena
    padding: Padding
    feedback: float
    rule: FeedbackRule | None

    def encode(
        self,
        number: int,
        weights: LocalWeights,
        cover: Cover,
        layout: Layout | SizedLayout,
        residual_C4096: Tensor,
    ) -> bytearray:
        """Payload of β·e + (A − L), or of what the rule makes of them; e becomes what the rule leaves.

        Raises Divergence for weights that are NaN or from 2⁶⁴ on, with everything as it was.
        """
        found = self._slabs(weights, cover, in_place=isinstance(layout, Layout) and not layout.has_table)
        if not all(self._each(found, weights, lambda _, span, local: self.encoder.is_sound(local))):
            raise Divergence("the local weights hold NaN or infinity", hint=TRAIN_AGAIN)
        payload = self._begun(layout, cover)
        if self.rule is None:
            work = self._plain(weights, payload, residual_C4096)
        else:
            left = self._left(self.rule.most_norm(number, size_of(cover) * CHUNK), found, weights)
            work = self._ruled(self.rule, number, weights, payload, residual_C4096, left)
        self._each(found, weights, work)
        data = payload.whole()
        if isinstance(layout, Layout) and layout.has_table:  # only now anything left e, its padding too
            for _, span in slabs(cover, self.encoder.slab_chunks):
                clear(residual_C4096[span.start : span.stop], self.padding, span.start)
        return data

    def _begun(self, layout: Layout | SizedLayout, cover: Cover) -> UnfinishedPayload:
        if isinstance(layout, SizedLayout):
            return SizedPayload(self.encoder, layout)
        return self.encoder.begin(layout, tensors_of(self.arena, cover) if layout.has_table else None)

    def _plain(self, weights: LocalWeights, payload: UnfinishedPayload, residual_C4096: Tensor) -> Work[None]:
        def work(at: int, cover: Cover, local: Tensor | Blocks) -> None:
            if isinstance(local, Blocks):
                payload.fill(at, residual_C4096, weights.anchor_C4096, local, self.feedback)
                return
            (span,) = cover
            residual = residual_C4096[span.start : span.stop]
            payload.fill(at, residual, weights.anchor_C4096[span.start : span.stop], local, self.feedback)
            clear(residual, self.padding, span.start)
            weights.mark_sent(span, local)

        return work

    def _ruled(
        self,
        rule: FeedbackRule,
        number: int,
        weights: LocalWeights,
        payload: UnfinishedPayload,
        residual_C4096: Tensor,
        left: float,
    ) -> Work[None]:
        def work(at: int, cover: Cover, local: Tensor | Blocks) -> None:
            (span,) = cover
            rows = slice(span.start, span.stop)
            residual, anchor = residual_C4096[rows], weights.anchor_C4096[rows]
            assert isinstance(local, Tensor), "a rule reads rows"

            def encode(wanted: Tensor) -> None:
                # The encoder adds a difference of weights to what it encodes: here of equal ones, which is 0.
                payload.fill(at, wanted, anchor, anchor, 1.0)

            delta = anchor - local
            rule.send(number, span, residual, delta if left == 1 else delta.mul_(left), encode)
            # A payload may name places that are padding, where nothing was trained and nothing may be kept.
            clear(residual, self.padding, span.start)
            if rule.memory is not None:
                clear(rule.memory.values_C4096[rows], self.padding, span.start)
            weights.mark_sent(span, local)

        return work

    def _left(self, most: float, found: list[_Slab], weights: LocalWeights) -> float:
        """Share of the local progress that clipping to a norm leaves, in 256ths where that is less than all."""
        if most == math.inf:
            return 1.0

        def square(_: int, cover: Cover, local: Tensor | Blocks) -> float:
            (span,) = cover
            assert isinstance(local, Tensor), "a rule reads rows"
            return float(torch.linalg.vector_norm(weights.anchor_C4096[span.start : span.stop] - local)) ** 2

        norm = math.sqrt(math.fsum(self._each(found, weights, square)))
        # Rounded down to 256ths: sums of another order, on another device, give the same share.
        return 1.0 if norm <= most else math.floor(256 * most / norm) / 256

    def _slabs(self, weights: LocalWeights, cover: Cover, *, in_place: bool) -> list[_Slab]:
        """One for each thread where the encoder reads weights in place, else as large as it likes them.

        Not `in_place` where slabs are cut once more, because blocks cannot be.
        """
        size, threads = size_of(cover), self.encoder.threads
        # A rule needs the anchor after the encoder has read it, so nothing becomes the anchor in passing.
        if in_place and self.encoder.reads_blocks and weights.are_readable and self.rule is None:
            # A share of a mixture has many spans. All of a thread's are one slab: a call after weights that filled
            # the caches finds nothing there, and seven took a tenth of the time of encoding them.
            cut = cut_in(cover, max(1, -(-size // threads)))
            return [_Slab(at, part, weights.blocks(part)) for at, part in cut]
        most = max(1, min(self.encoder.slab_chunks, size))
        return [_Slab(at, (span,), None) for at, span in slabs(cover, most)]

    def _each(self, found: list[_Slab], weights: LocalWeights, work: Work[T]) -> list[T]:
        """Results of `work` for every slab, by all threads together. Each thread has one buffer for copies."""
        threads, device = self.encoder.threads, self.encoder.device
        most = max((size_of(slab.cover) for slab in found if slab.blocks is None), default=0)

        def share(first: int) -> list[T]:
            into_M4096 = torch.empty((most, CHUNK), device=device)
            return [
                work(at, cover, weights.rows(cover[0], into_M4096) if blocks is None else blocks)
                for at, cover, blocks in found[first::threads]
            ]

        if threads == 1:
            return share(0)
        with ThreadPoolExecutor(max_workers=threads) as pool:
            return [found for each in pool.map(share, range(threads)) for found in each]


def tensors_of(arena: Arena, cover: Cover) -> list[int]:
    """Number of the tensor of each chunk of a cover. Vectors, which share chunks, are one tensor."""
    tensor_C = [-1] * arena.chunks
    for number, place in enumerate(arena.placements):
        if len(place.shape) == 2:
            chunks = place.blocks[0] * place.blocks[1]
            tensor_C[place.first_chunk : place.first_chunk + chunks] = [number] * chunks
    return [tensor for span in cover for tensor in tensor_C[span.start : span.stop]]
