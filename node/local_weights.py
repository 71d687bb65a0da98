"""The weights that a worker trains, L, and their anchor A: what they were when the swarm last heard of them.

    end of a round      Δ = A − L is sent, then A ← L on the round's cover: these chunks are in flight
    its fold is in      L ← V + κ·(L − A), A ← V on these chunks; V is the view, κ the share of
                        the progress made meanwhile that stays (`outer.keep_256`)
    other chunks        where the view moved, L ← V + (L − A), A ← V

So what was trained but not sent is never lost, and the order in which the view moved leaves no trace but
rounding. The overlap is Streaming DiLoCo's (arXiv 2501.18512 §2.3), with an anchor for each chunk. A weight that
did not move since its anchor becomes exactly the view's. All work is done slab by slab: beside L only A is as
large as the model.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.node.model import bridge
from atoll.node.outer.fixed import to_float
from atoll.protocols.arena import CHUNK, arena_of
from atoll.protocols.coverage import Cover, cover_of, rest_of, slabs
from atoll.protocols.errors import CorruptFault
from atoll.protocols.run import RunSpec
from atoll.protocols.spans import Span

SLAB_CHUNKS = 128
"""2 MiB of float32."""
_LOCAL = "local/"
_ANCHOR = "anchor"


class LocalWeights:
    """A module's parameters and their anchor. The module may be on any device, the anchor is on the CPU."""

    def __init__(self, module: nn.Module, spec: RunSpec) -> None:
        """The values are undefined until `start` or `load`."""
        self._named = {name: parameter.detach() for name, parameter in module.named_parameters()}
        self._spec, self._arena = spec, arena_of(spec.model)
        self._keep = spec.outer.keep_256 / 256
        self.anchor_C4096 = torch.empty((self._arena.chunks, CHUNK))
        self.sent = -1
        """Round whose cover is in flight: sent, and not merged with its fold. −1: none."""

    def start(self, view_C4096: Tensor) -> None:
        """L ← V, A ← V: what was trained and not sent is dropped, nothing is in flight."""
        for span in self._all_slabs():
            rows = slice(span.start, span.stop)
            self.anchor_C4096[rows] = to_float(view_C4096[rows])
            bridge.write_rows(self._named, self._arena, span.start, self.anchor_C4096[rows])
        self.sent = -1

    def merge(self, view_C4096: Tensor, *, arrived: bool) -> None:
        """Take in an int32 view. `arrived`: what is in flight is folded, or given up; else it is left alone."""
        flying = self._flying()
        for _, span in slabs(rest_of(flying, self._arena.chunks), SLAB_CHUNKS):
            self._follow(view_C4096, span)
        if arrived:
            for _, span in slabs(flying, SLAB_CHUNKS):
                self._land(view_C4096, span)
            self.sent = -1

    def rows(self, span: Span, into_M4096: Tensor | None = None) -> Tensor:
        """L of some chunks, float32 `[N, 4096]` on the CPU; a copy, at the start of `into` where that is given."""
        size = span.stop - span.start
        rows_N4096 = torch.empty((size, CHUNK)) if into_M4096 is None else into_M4096[:size]
        bridge.read_rows(self._named, self._arena, span.start, rows_N4096)
        return rows_N4096

    def mark_sent(self, span: Span, local_N4096: Tensor) -> None:
        """These rows of L have been said: A ← L. `sent` is set when all of a round's cover has been."""
        self.anchor_C4096[span.start : span.stop] = local_N4096

    @contextmanager
    def lent_to(self, view_C4096: Tensor) -> Iterator[None]:
        """Inside, the module holds the view; afterwards L again."""
        kept = {name: value.clone() for name, value in self._named.items()}
        try:
            for span in self._all_slabs():
                rows = to_float(view_C4096[span.start : span.stop])
                bridge.write_rows(self._named, self._arena, span.start, rows)
            yield
        finally:
            for name, value in self._named.items():
                value.copy_(kept[name])

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: L as `local/NAME`, A as `anchor`; no copies."""
        return {_ANCHOR: self.anchor_C4096, **{_LOCAL + name: value for name, value in self._named.items()}}

    def load(self, tensors: Mapping[str, Tensor], sent: int) -> None:
        """Take over what `tensors` gave (`check_saved`)."""
        self.anchor_C4096.copy_(tensors[_ANCHOR])
        for name, value in self._named.items():
            value.copy_(tensors[_LOCAL + name])
        self.sent = sent

    def check_saved(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise CorruptFault unless `load` can take these."""
        for name, value in self.tensors().items():
            found = tensors.get(name)
            if found is None or found.shape != value.shape or not all_finite(found):
                raise CorruptFault(f"the saved {name} is missing, of another shape or not finite")

    def _flying(self) -> Cover:
        return cover_of(self._spec, self.sent) if self.sent >= 0 else ()

    def _follow(self, view_C4096: Tensor, span: Span) -> None:
        """Nothing in flight: where the view moved, L moves with it."""
        rows = slice(span.start, span.stop)
        fresh, anchor = to_float(view_C4096[rows]), self.anchor_C4096[rows]
        moved = (fresh != anchor).any(1)
        if bool(moved.any()):
            local = self.rows(span)
            local[moved] = (local[moved] - anchor[moved]).add_(fresh[moved])
            self._settle(span, local, fresh)

    def _land(self, view_C4096: Tensor, span: Span) -> None:
        """What was in flight is in the view: L keeps a share of what was trained since."""
        rows = slice(span.start, span.stop)
        fresh = to_float(view_C4096[rows])
        local = self.rows(span).sub_(self.anchor_C4096[rows]).mul_(self._keep).add_(fresh)
        self._settle(span, local, fresh)

    def _settle(self, span: Span, local_N4096: Tensor, fresh_N4096: Tensor) -> None:
        bridge.write_rows(self._named, self._arena, span.start, local_N4096)
        self.anchor_C4096[span.start : span.stop] = fresh_N4096

    def _all_slabs(self) -> Iterator[Span]:
        return (span for _, span in slabs((Span(0, self._arena.chunks),), SLAB_CHUNKS))


def carries(spec: RunSpec) -> bool:
    """Whether L is more than the view when a round begins: then it and A must survive a restart."""
    return spec.outer.fragments > 1 or spec.outer.overlap_steps > 0


def all_finite(values: Tensor) -> bool:
    """Slab by slab: a mask as large as the model is not made."""
    return all(bool(part.isfinite().all()) for part in torch.split(values.reshape(-1), SLAB_CHUNKS * CHUNK))
