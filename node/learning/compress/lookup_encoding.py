"""Compiled: the codec `lookup2`, SparseLoCo's quantiser as its authors coded it, for comparison.

    s = 6σ/4        code = clamp(round((v − μ)/s + 2), 0, 3)        value = mean of the values of this code

μ and σ (unbiased) are of all chosen values of a tensor, so nothing can be written before its last chunk is chosen:
`LookupPayload` keeps the places, and quantises in `whole`. Source: SparseLoCo, arXiv 2508.15706, and the code of
templar and SparseLoCo (`_quantize`): four bins, a range of six σ, a table of their means. Here a mean is an fp16,
and one that rounds to 0 is the smallest fp16 of its sign, because 0 means that nothing was sent.

On the wire each chunk has the entries of the table that it uses, so a chunk can be read alone, as with every
codec; a value is a whole number, ±unit·4 in units of 2⁻²⁶. Fold and bounds of sums are those of `sparse2`.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from atoll.node.learning.compress.blocks import Blocks, add_up, blocks_of_rows
from atoll.node.learning.compress.encoding import blank_payload, is_sound, pack_chunk
from atoll.node.learning.compress.lookup import ENTRIES, SIGN, signed_units
from atoll.node.learning.compress.reading import sparse_shape
from atoll.node.learning.compress.selecting import choose, selection_scratch
from atoll.node.learning.kernels.compiled import Bytes, Ints32, compiled
from atoll.protocols.errors import TRAIN_AGAIN, Divergence
from atoll.protocols.run.payload import LOW_LEVEL, VALUE_BITS, Layout

_UNIT = np.float32(2.0**-VALUE_BITS)
_RANGE = 6.0


class LookupPayload:
    """A payload that is quantised when all of its chunks are chosen: see `codecs.UnfinishedPayload`."""

    def __init__(self, layout: Layout, tensor_C: Sequence[int] | None = None) -> None:
        """`tensor_C`: number of the tensor that each chunk is of; None: all are one tensor."""
        self._layout = layout
        self._tensor_C = np.zeros(layout.chunks, np.int64) if tensor_C is None else np.asarray(tensor_C, np.int64)
        self._bytes = blank_payload(layout)
        self._parts: list[tuple[int, Tensor, Ints32]] = []

    def fill(
        self, at: int, residual_C4096: Tensor, anchor_C4096: Tensor, local: Tensor | Blocks, beta: float
    ) -> None:
        """Choose the values of chunks from `at` on; the residual becomes β·e + (anchor − local), until `whole`."""
        assert isinstance(local, Tensor), "places are of rows"
        index_Nk = np.empty((len(residual_C4096), self._layout.k), np.int32)
        arrays = (anchor_C4096.numpy(), blocks_of_rows(local).table, residual_C4096.numpy())
        if not select_chunks(*arrays, np.float32(beta), index_Nk, selection_scratch(self._layout.k)):
            raise Divergence("the error feedback holds NaN or infinity", hint=TRAIN_AGAIN)
        self._parts.append((at, residual_C4096, index_Nk))

    def whole(self) -> bytearray:
        """The payload; what it sends leaves the residuals that were given, also of their padding."""
        value_Ck = np.zeros((self._layout.chunks, self._layout.k), np.float32)
        for at, residual, index_Nk in self._parts:
            chosen = residual.gather(1, torch.from_numpy(index_Nk.astype(np.int64)))
            value_Ck[at : at + len(index_Nk)] = chosen.numpy()
        code_Ck = np.zeros(value_Ck.shape, np.uint8)
        half_C4 = np.zeros((self._layout.chunks, ENTRIES), np.int64)
        for tensor in np.unique(self._tensor_C):
            rows = self._tensor_C == tensor
            codes, half_C4[rows] = quantised(value_Ck[rows].astype(np.float64).ravel())
            code_Ck[rows] = codes.reshape(-1, self._layout.k)
        out, shape, offsets = (
            np.frombuffer(self._bytes, np.uint8),
            sparse_shape(self._layout),
            self._layout.offsets,
        )
        own = np.empty(self._layout.k, np.int32), np.zeros(self._layout.k + 8, np.uint8)
        for at, residual, index_Nk in self._parts:
            rows = slice(at, at + len(index_Nk))
            write_chunks(out, at, index_Nk, code_Ck[rows], half_C4[rows], residual.numpy(), offsets, shape, own)
        return self._bytes


def quantised(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Codes of the chosen values of a tensor, and the fp16 bits of their table."""
    # Sums are exact (fsum), so that equal values give equal bytes whatever adds them up on a machine.
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((values - mean) ** 2) / max(1, len(values) - 1))
    step = _RANGE * spread / ENTRIES or 1.0
    codes = np.clip(np.rint((values - mean) / step + ENTRIES // 2), 0, ENTRIES - 1).astype(np.uint8)
    halves = np.zeros(ENTRIES, np.int64)
    for code in np.unique(codes):
        mine = values[codes == code]
        halves[code] = _half_of(math.fsum(mine) / len(mine)) if values.any() else 0
    return codes, halves


def _half_of(mean: float) -> int:
    """Bits of the fp16 nearest to a mean, of a magnitude between the smallest one and 1."""
    size = int(np.float16(min(abs(mean), 1.0)).view(np.uint16))
    return max(1, size) | (SIGN if mean < 0 else 0)


def encode_residual(
    residual_C4096: Tensor, anchor_C4096: Tensor, local_C4096: Tensor, beta: float, layout: Layout
) -> bytes:
    """As `encoding.encode_residual`; all chunks are one tensor."""
    if not is_sound(local_C4096):
        raise Divergence("the pseudo-gradient holds NaN or infinity")
    payload = LookupPayload(layout)
    payload.fill(0, residual_C4096, anchor_C4096, local_C4096, beta)
    return bytes(payload.whole())


@compiled
def select_chunks(anchor: Any, local: Any, residual: Any, beta: Any, index: Any, scratch: Any) -> bool:
    """e ← β·e + (anchor − local), and the places of its k largest values; False where it is not finite."""
    guess = 0
    for row in range(len(residual)):
        e = residual[row]
        add_up(e, anchor[row], local[0], row, beta, False)
        guess = choose(e.view(np.int32), index.shape[1], guess, scratch)
        if guess < 0:
            return False
        for i in range(index.shape[1]):
            index[row, i] = scratch[1][i]
    return True


@compiled
def write_chunks(
    out: Bytes, at: int, index: Any, codes: Any, halves: Any, residual: Any, offsets: Any, shape: Any, own: Any
) -> None:
    """Rows from `at` on of all sections; what is sent leaves the residual. `own`: k places, and k + 8 zeros."""
    place, code = own
    for row in range(len(index)):
        c, count, last = at + row, 0, np.int64(0)
        spot = offsets[0] + c * shape.word_bytes
        # A chunk names the entries that it uses, in order: unused ones would be a second form of the same values.
        for entry in range(ENTRIES):
            used = False
            for i in range(shape.k):
                used |= codes[row, i] == entry
            unit = signed_units(halves[row, entry])
            if not used or unit == 0:
                continue
            if count == 0 or unit != last:  # two means may round to one fp16
                out[spot + 2 * count] = halves[row, entry] & 255
                out[spot + 2 * count + 1] = halves[row, entry] >> 8
                count, last = count + 1, unit
            value = np.float32(unit * LOW_LEVEL) * _UNIT
            for i in range(shape.k):
                if codes[row, i] == entry:
                    code[i] = count - 1
                    residual[row, index[row, i]] -= value
        for i in range(shape.k):
            place[i] = index[row, i] if count else i
            code[i] = code[i] if count else 0
        pack_chunk(out, c, place, code, offsets, shape)
