"""Payloads with a k for each tensor are checked, folded, and given back: tensor by tensor, by the codec of one k.

Members of a round may have another k in a tensor: one of them began the round before the newest table. Then the
tensor is folded from decoded values (`mixed_fold`), with the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.node.learning.compress import folding
from atoll.node.learning.compress.codecs import Codec, codec_of
from atoll.node.learning.compress.folding import OuterStep, Payload
from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.mixed_fold import fold_mixed
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sized_payload import CODEC, Head, SizedLayout, part_layout, read_head, sized_layout


@dataclass(frozen=True, slots=True)
class SizedCodec:
    """The codec of one round."""

    sizes: SizedLayout

    def check(self, payload: Payload, chunks: int = 0) -> None:
        """Raise DecodeError unless these bytes are a legal payload; `chunks` follow from the layout."""
        for (_, size), (k, part) in zip(self._rows(), self._parts(payload), strict=True):
            codec_of(CODEC, k).check(part, size)

    def apply_update(
        self,
        theta_S4096: Tensor,
        weights: Sequence[int],
        payloads: Sequence[Payload],
        step: OuterStep,
        *,
        threads: int = 1,
        fresh: Fresh = fresh_like,
    ) -> Tensor:
        """θ + U, a new int32 array, of one round's set; rows behind the tensors stay. Errors: as `Codec`'s."""
        folding.check_weights(weights)
        out = fresh(theta_S4096)
        members = [list(self._parts(payload)) for payload in payloads]
        for tensor, (first, chunks) in enumerate(self._rows()):
            rows, parts = slice(first, first + chunks), [member[tensor] for member in members]
            ks, data = {k for k, _ in parts}, [part for _, part in parts]
            if len(ks) == 1:
                layout = part_layout(chunks, *ks)
                whole = [None] * len(data)
                folding.fold_into(
                    out[rows], theta_S4096[rows], weights, data, whole, layout, step, threads=threads
                )
            else:
                out[rows] = theta_S4096[rows]
                tables = [folding.decode(part, part_layout(chunks, k)) for k, part in parts]
                named = [(weight, *table) for weight, table in zip(weights, tables, strict=True)]
                fold_mixed(out[rows], named, step.alpha_256, step.floor_256)
        behind = sum(self.sizes.chunks_T)
        out[behind:] = theta_S4096[behind:]
        return out

    def give_back(self, residual_C4096: Tensor, payload: Payload) -> None:
        """Add a payload that missed its final set to the residual. Raises DecodeError with the residual intact."""
        self.check(payload)  # whole: a fault of the last tensor must not leave the others added
        for (first, chunks), (k, part) in zip(self._rows(), self._parts(payload), strict=True):
            codec_of(CODEC, k).give_back(residual_C4096[first : first + chunks], part)

    def _rows(self) -> Iterator[tuple[int, int]]:
        """First chunk and number of chunks of each tensor."""
        first = 0
        for chunks in self.sizes.chunks_T:
            yield first, chunks
            first += chunks

    def _parts(self, payload: Payload) -> Iterator[tuple[int, Payload]]:
        """k and bytes of each tensor. Raises DecodeError for an illegal head."""
        head: Head = read_head(payload, self.sizes)
        view = memoryview(payload)
        for k, start, stop in zip(head.k_T, head.offsets_T, head.offsets_T[1:], strict=False):
            yield k, view[start:stop]


def codec_of_round(spec: RunSpec, number: int) -> Codec | SizedCodec:
    """The codec of the payloads of round `number`."""
    if spec.compress.sizes:
        return SizedCodec(sized_layout(spec, number))
    return codec_of(spec.compress.codec, spec.compress.k_of(number))
