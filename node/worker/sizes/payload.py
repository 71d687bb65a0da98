"""A payload with a k for each tensor is made: part by part by the run's encoder, with the errors that others had.

The error of a k is what the codec itself would leave of β·e + (anchor − local), quantiser included, so a measured
round encodes once more for each k of the list.
"""

import math
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from atoll.node.learning.compress.blocks import Blocks
from atoll.node.learning.compress.codecs import Encoder, codec_of
from atoll.node.worker.sizes.program import LOG_UNITS
from atoll.protocols.run.sized_payload import CODEC, SizedLayout, part_layout, write_head

_BIAS = 1 << 15


class SizedPayload:
    """A payload of parts that an encoder of the host makes; see `codecs.UnfinishedPayload`."""

    def __init__(self, encoder: Encoder, layout: SizedLayout) -> None:
        self._layout = layout
        self._firsts = list(accumulate(layout.chunks_T, initial=0))
        self._parts = [
            encoder.begin(part_layout(chunks, k))
            for chunks, k in zip(layout.chunks_T, layout.wanted_T, strict=True)
        ]
        self._errors: dict[int, tuple[int, list[float]]] = {}
        """By the first chunk of a piece: its tensor, and the squared error of each k."""

    def fill(
        self, at: int, residual_N4096: Tensor, anchor_N4096: Tensor, local: Tensor | Blocks, beta: float
    ) -> None:
        """As `codecs.UnfinishedPayload`, of rows."""
        assert isinstance(local, Tensor), "a slab is cut where a tensor ends"
        for tensor, start, stop in self._pieces(at, at + len(residual_N4096)):
            rows = slice(start - at, stop - at)
            residual, anchor, own = residual_N4096[rows], anchor_N4096[rows], local[rows]
            if self._layout.is_measured:
                wanted = residual * beta + (anchor - own)
                self._errors[start] = tensor, [error_of(wanted, k) for k in self._layout.ks]
            self._parts[tensor].fill(start - self._firsts[tensor], residual, anchor, own, beta)

    def whole(self) -> bytearray:
        """The payload, when all chunks are filled."""
        sums_TK = [[0.0] * len(self._layout.ks) for _ in self._parts]
        # In the order of chunks: threads fill pieces as they come, and a sum of floats has an order.
        for _, (tensor, errors_K) in sorted(self._errors.items()):
            sums_TK[tensor] = [have + more for have, more in zip(sums_TK[tensor], errors_K, strict=True)]
        said = [list(map(log_of, errors_K)) for errors_K in sums_TK] if self._layout.is_measured else ()
        return bytearray(write_head(self._layout, said)) + b"".join(part.whole() for part in self._parts)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Each tensor that has chunks of `start … stop - 1`, and which."""
        for tensor, first in enumerate(self._firsts[:-1]):
            low, high = max(start, first), min(stop, self._firsts[tensor + 1])
            if low < high:
                yield tensor, low, high


def error_of(wanted_N4096: Tensor, k: int) -> float:
    """Squared error that the codec with this k leaves of what is to be sent."""
    left_N4096, nothing_N4096 = wanted_N4096.clone(), torch.zeros_like(wanted_N4096)
    codec_of(CODEC, k).encode(left_N4096, nothing_N4096, nothing_N4096, 1.0)
    return float(left_N4096.square().sum(dtype=torch.float64))


def log_of(error: float) -> int:
    """The error as a u16: 16ths of log2, plus 2¹⁵; 0 for none."""
    return max(0, min(0xFFFF, round(LOG_UNITS * math.log2(error)) + _BIAS)) if error > 0 else 0
