"""The weights that a worker trains, L, and their anchor A: the weights as of the last payload or view.

    end of a round      Δ = A − L is sent, then A ← L on the round's cover: these chunks are in flight
    its fold is in      L ← V + κ·(L − A), A ← V on these chunks; V is the view, κ the share of
                        the progress made meanwhile that stays (`outer.keep_256`)
                        with `outer.late` blend: L ← V + κ·(L − V), A ← V
    other chunks        where the view moved, L ← V + (L − A), A ← V

Experts that are not trained here have neither L nor A, and their rows of A take no memory on the host: the
module's frozen copy is V as of the last time that L took it in.

So what was trained but not sent is never lost, and the order in which the view moved leaves no trace but
rounding. A blend is what Streaming DiLoCo publishes (Alg. 2, κ is its α): the share of the members' own progress
that stays is in their next contribution again, and L depends on when the view moved. Nothing that is agreed
does: a contribution remains what the weights moved from A, and its residual. The overlap is Streaming DiLoCo's
(arXiv 2501.18512 §2.3), with an anchor for each chunk. A weight that did not move since its anchor becomes
exactly the view's. All work is done slab by slab: beside L only A is as large as the model.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atoll.node.checkpoint.local import ANCHOR, ANCHOR_ROWS, LOCAL, WHOLE_ANCHOR
from atoll.node.checkpoint.tensorfile import read_atom
from atoll.node.learning.compress.blocks import Blocks, MatrixPart, blocks_of, is_readable
from atoll.node.learning.kernels.compiled import untouched_zeros
from atoll.node.learning.model import bridge
from atoll.node.learning.model.bridge import frozen_names, named_atoms, write_atoms
from atoll.node.learning.outer.fixed import to_float
from atoll.protocols.ledger.coverage import Cover, cover_of, rest_of, shared_by, slabs, trained_cover
from atoll.protocols.run.arena import CHUNK, SIDE, Placement, Span, arena_of
from atoll.protocols.run.run_spec import RunSpec

SLAB_CHUNKS = 128
"""Chunks of a slab on the host: 2 MiB of float32."""
DEVICE_SLAB_CHUNKS = 1 << 11
"""Chunks of a slab where the anchor is on a device: 32 MiB, of which a merge has five at hand."""


class LocalWeights:
    """A module's atoms and their anchor, float32 `[C, 4096]`; all sums are done where the anchor is.

    Rows of the anchor that are not trained here are zero.
    """

    def __init__(
        self, module: nn.Module, spec: RunSpec, experts: bytes = b"", device: torch.device | str = "cpu"
    ) -> None:
        """The values are undefined until `start` or `load`. `experts`: bitmap of those that `module` trains.

        `device`: of the anchor; the module may be on another one.
        """
        self._spec = spec
        self._arena = arena_of(spec.model)
        self._kept_share = spec.outer.keep_256 / 256
        self._blends = spec.outer.late == "blend"
        self.anchor_C4096 = untouched_zeros(self._arena.chunks, device)
        self._view_C4096: Tensor | None = None
        """V as of the last time that L took it in; int32, never changed."""
        self._slab_chunks = DEVICE_SLAB_CHUNKS if self.anchor_C4096.is_cuda else SLAB_CHUNKS
        self.sent = -1
        """Round whose cover is in flight: sent, and not merged with its fold. −1: none."""
        self.sent_experts = b""
        """Experts that the payload in flight covers."""
        self.changes = 0
        """How often the module's values were changed by other things than steps."""
        self.is_scratch = False
        """Nothing is trained here, and nothing is kept: L and A are undefined; only the module takes memory."""
        self._attach(module, experts)

    def _attach(self, module: nn.Module, experts: bytes) -> None:
        frozen = frozen_names(module)
        self._module = module
        self.experts = experts
        self._named = {name: v.detach() for name, v in named_atoms(module).items() if name not in frozen}
        # A share of a mixture is a hundred small matrices: to list them took a tenth of the time of encoding them.
        self._blocks = dict[Cover, tuple[Blocks, list[tuple[Tensor, Tensor]]]]()
        self.are_readable = all(is_readable(value) for value in self._named.values() if value.dim() == 2)
        """Whether `blocks` can read all of L where it stands."""
        self._trained = trained_cover(self._spec.model, experts)
        self._frozen = [place for place in self._arena.placements if place.name in frozen]

    def trained(self) -> dict[str, Tensor]:
        """L by name of the atom, as views into the module."""
        return dict(self._named)

    def detach_module(self) -> None:
        """Forget the module: `move_to` gives another one."""
        self._module = nn.Module()
        self._named, self._blocks = {}, {}
        self._frozen = []

    def move_to(self, module: nn.Module, experts: bytes, trained: Mapping[str, Tensor]) -> None:
        """Go on in another module, which trains other experts, with what `trained` gave; the rest is V."""
        self.changes += 1
        before, anchor_C4096 = self._trained, self.anchor_C4096
        self._attach(module, experts)
        self.anchor_C4096 = untouched_zeros(len(anchor_C4096), anchor_C4096.device)
        for span in self._slabs_of(shared_by(self._trained, before)):
            self.anchor_C4096[span.start : span.stop] = anchor_C4096[span.start : span.stop]
        view_C4096 = self._view_C4096
        if view_C4096 is not None:
            for span in self._slabs_of(shared_by(self._trained, rest_of(before, len(anchor_C4096)))):
                self.anchor_C4096[span.start : span.stop] = self._fresh(view_C4096, span)
            self._freeze(self._frozen)
        for span in self._slabs_of(self._trained):
            bridge.write_rows(self._named, self._arena, span.start, self.anchor_C4096[span.start : span.stop])
        for name in self._named.keys() & trained.keys():
            self._named[name].copy_(trained[name])

    def start(self, view_C4096: Tensor) -> None:
        """L ← V, A ← V: what was trained and not sent is dropped, nothing is in flight."""
        if self.is_scratch:
            return
        self.changes += 1
        for span in self._slabs_of(self._trained):
            fresh = self._fresh(view_C4096, span)
            self._write(span, fresh, fresh)
        self._view_C4096 = view_C4096
        self._freeze(self._frozen)
        self.sent = -1

    def merge(self, view_C4096: Tensor, *, arrived: bool) -> None:
        """Merge an int32 view. `arrived`: what is in flight is folded, or given up; else it is left alone."""
        self.changes += 1
        in_flight = self._in_flight()
        for span in self._slabs_of(shared_by(self._trained, rest_of(in_flight, self._arena.chunks))):
            self._merge_moved(view_C4096, span)
        if arrived:
            for span in self._slabs_of(in_flight):
                self._merge_arrived(view_C4096, span)
            self.sent = -1
        before, self._view_C4096 = self._view_C4096, view_C4096
        self._freeze([place for place in self._frozen if before is None or _differ(place, before, view_C4096)])

    def rows(self, span: Span, into_M4096: Tensor | None = None) -> Tensor:
        """L of chunks that are trained here, a float32 copy `[N, 4096]` beside the anchor; in `into` if given."""
        size = span.stop - span.start
        rows_N4096 = self.anchor_C4096.new_empty((size, CHUNK)) if into_M4096 is None else into_M4096[:size]
        bridge.read_rows(self._named, self._arena, span.start, rows_N4096)
        return rows_N4096

    def blocks(self, cover: Cover) -> Blocks:
        """L of chunks that are trained here: matrices where they stand, vectors copied. Only if `are_readable`.

        What it returned before for the same cover is not to be read any more.
        """
        if cover not in self._blocks:
            parts, copies = list[MatrixPart](), list[tuple[Tensor, Tensor]]()
            for part, place in (each for span in cover for each in bridge.parts_of(self._arena, span)):
                if len(place.shape) == 2:
                    first = part.start - place.first_chunk
                    parts.append(MatrixPart(self._named[place.name], first, part.chunks, part.start))
                else:
                    rows = torch.zeros((part.chunks, CHUNK))
                    copies += bridge.views(self._named, self._arena, part.start, rows)
                    parts.append(MatrixPart(rows.view(-1, SIDE), 0, part.chunks, part.start))
            self._blocks[cover] = blocks_of(parts), copies
        blocks, copies = self._blocks[cover]
        if copies:  # all at once: a model has a few dozen vectors, and a call for each costs more than its values
            torch._foreach_copy_([row for row, _ in copies], [value for _, value in copies])
        return blocks

    def replace_rows(self, span: Span, local_N4096: Tensor) -> None:
        """L ← local on chunks that are trained here, in the middle of a round; A stays. Count it in `changes`."""
        bridge.write_rows(self._named, self._arena, span.start, local_N4096)

    def mark_sent(self, span: Span, local_N4096: Tensor) -> None:
        """A ← L on rows that a payload holds now. `sent` is set when all of a round's cover has been."""
        self.anchor_C4096[span.start : span.stop] = local_N4096

    @contextmanager
    def replaced_by(self, view_C4096: Tensor) -> Iterator[None]:
        """Inside, the module holds the view; afterwards L again."""
        self._module.zero_grad(set_to_none=True)  # L's copy takes the place of gradients that were used
        kept = {} if self.is_scratch else {name: value.clone() for name, value in self._named.items()}
        self.changes += 1
        try:
            for span in self._slabs_of(self._trained):
                bridge.write_rows(self._named, self._arena, span.start, self._fresh(view_C4096, span))
            write_atoms(self._module, ((p.name, to_float(read_atom(view_C4096, p))) for p in self._frozen))
            yield
        finally:
            self.changes += 1
            for name, value in kept.items():
                self._named[name].copy_(value)
            if not self.is_scratch:
                self._freeze(self._frozen)

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint: L as `local/NAME`, without copies; A of the chunks where it is not L.

        When a round has just been encoded these are none of its cover. Nothing where these are none: all is sent.
        """
        rows = list[int]()
        for span in self._slabs_of(self._trained):
            anchor, local = self.anchor_C4096[span.start : span.stop], self.rows(span)
            differ = (anchor.view(torch.int32) != local.view(torch.int32)).any(1)
            rows += (torch.nonzero(differ).flatten() + span.start).tolist()
        if not rows:
            return {}
        at = torch.tensor(rows, dtype=torch.int64)
        trained = {LOCAL + name: value for name, value in self._named.items()}
        return {ANCHOR_ROWS: at, ANCHOR: self.anchor_C4096[at.to(self.anchor_C4096.device)], **trained}

    def are_in(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether a generation holds local weights of all that is trained here."""
        return {LOCAL + name for name in self._named} <= tensors.keys()

    def load(self, tensors: Mapping[str, Tensor], sent: int, sent_experts: bytes, view_C4096: Tensor) -> None:
        """Load what `tensors` gave where the same experts were trained; frozen copies become V."""
        self.changes += 1
        for name, value in self._named.items():
            value.copy_(tensors[LOCAL + name])
        whole_C4096 = tensors.get(WHOLE_ANCHOR)
        for span in self._slabs_of(self._trained):
            rows = slice(span.start, span.stop)
            self.anchor_C4096[rows] = self.rows(span) if whole_C4096 is None else whole_C4096[rows]
        if whole_C4096 is None:
            at, device = tensors[ANCHOR_ROWS], self.anchor_C4096.device
            self.anchor_C4096[at.to(device)] = tensors[ANCHOR].to(device)
        self._view_C4096 = view_C4096
        self._freeze(self._frozen)
        self.sent = sent
        self.sent_experts = sent_experts

    def _in_flight(self) -> Cover:
        """Chunks that are trained here and in flight."""
        if self.sent < 0:
            return ()
        return shared_by(self._trained, cover_of(self._spec, self.sent, self.sent_experts))

    def _freeze(self, places: Iterable[Placement]) -> None:
        """Write V into the frozen copies of these atoms."""
        view_C4096 = self._view_C4096
        if view_C4096 is not None:
            write_atoms(self._module, ((place.name, to_float(read_atom(view_C4096, place))) for place in places))

    def _merge_moved(self, view_C4096: Tensor, span: Span) -> None:
        """Nothing in flight: where the view moved, L moves with it."""
        rows = slice(span.start, span.stop)
        fresh, anchor = self._fresh(view_C4096, span), self.anchor_C4096[rows]
        moved = (fresh != anchor).any(1)
        if bool(moved.any()):
            local = self.rows(span)
            local[moved] = (local[moved] - anchor[moved]).add_(fresh[moved])
            self._write(span, local, fresh)

    def _merge_arrived(self, view_C4096: Tensor, span: Span) -> None:
        """What was in flight is in the view: L keeps a share of what was trained since; blending, of all of it."""
        rows = slice(span.start, span.stop)
        fresh = self._fresh(view_C4096, span)
        # Blending needs no anchor: A ← L when sent, as in a rebase, so all else works as there.
        origin = fresh if self._blends else self.anchor_C4096[rows]
        local = self.rows(span).sub_(origin).mul_(self._kept_share).add_(fresh)
        self._write(span, local, fresh)

    def _fresh(self, view_C4096: Tensor, span: Span) -> Tensor:
        """V of some chunks, float32, where the anchor is."""
        return to_float(view_C4096[span.start : span.stop].to(self.anchor_C4096.device))

    def _write(self, span: Span, local_N4096: Tensor, fresh_N4096: Tensor) -> None:
        """L ← local, A ← fresh on these chunks."""
        bridge.write_rows(self._named, self._arena, span.start, local_N4096)
        self.anchor_C4096[span.start : span.stop] = fresh_N4096

    def _slabs_of(self, cover: Cover) -> Iterator[Span]:
        return (span for _, span in slabs(cover, self._slab_chunks))


def _differ(place: Placement, first_C4096: Tensor, second_C4096: Tensor) -> bool:
    """Whether two arenas differ in an atom's chunks."""
    rows = slice(place.first_chunk, place.first_chunk + place.blocks[0] * place.blocks[1])
    return not torch.equal(first_C4096[rows], second_C4096[rows])


def carries(spec: RunSpec) -> bool:
    """Whether L is more than the view when a round begins: then it and A must survive a restart."""
    return spec.outer.fragments > 1 or spec.outer.overlap_steps > 0
