"""The one seam to the codecs: what a run compresses with (`RunSpec.compress`), and where a worker encodes.

An encoder makes payloads; e and the anchor lie on its device. On the host: compiled, by several threads. On a GPU:
`compress.gpu.encoder`. Both give the same bytes and e.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.node.learning.compress import encoding, folding, lookup_encoding
from atoll.node.learning.compress.blocks import Blocks
from atoll.node.learning.compress.folding import OuterStep, Payload, Rows
from atoll.node.learning.compress.measuring import Judge
from atoll.node.learning.kernels.compiled import Fresh, fresh_like
from atoll.node.learning.outer.rules.landing import PLAIN, Landing
from atoll.protocols.run.payload import Layout, check_codec

HOST = torch.device("cpu")
SLAB_CHUNKS = 128
"""2 MiB of float32: what all threads of the host have at hand together, at the most one slab each."""


class Codec(NamedTuple):
    """A codec with its k; see `encoding` and `folding` for shapes and errors."""

    name: str
    k: int

    def layout(self, chunks: int) -> Layout:
        """Layout of a payload of so many chunks; `encoding.encode_rows` fills it part by part."""
        return Layout(self.name, chunks, self.k)

    def encode(self, residual_C4096: Tensor, anchor_C4096: Tensor, local_C4096: Tensor, beta: float) -> bytes:
        """Payload of β·e + (anchor − local); the residual becomes what was not sent."""
        layout = self.layout(len(residual_C4096))
        encode = lookup_encoding.encode_residual if layout.has_table else encoding.encode_residual
        return encode(residual_C4096, anchor_C4096, local_C4096, beta, layout)

    def check(self, payload: Payload, chunks: int) -> None:
        """Raise DecodeError unless these bytes are a legal payload."""
        folding.check(payload, self.layout(chunks))

    def apply_update(
        self,
        theta_C4096: Tensor,
        weights: Sequence[int],
        payloads: Sequence[Payload],
        step: OuterStep,
        *,
        rows: Sequence[Rows | None] | None = None,
        judge: Judge | None = None,
        landing: Landing = PLAIN,
        threads: int = 1,
        fresh: Fresh = fresh_like,
    ) -> Tensor:
        """θ + U, a new int32 array, of one round's set; `rows` where payloads cover some chunks only.

        `landing`: see `folding.fold_into`; the result is a whole state then.
        """
        out, layout = fresh(theta_C4096), self.layout(len(landing.row_C) if landing.kind else len(theta_C4096))
        if landing.kind and layout.chunks != landing.chunks:  # rows outside the cover stay
            out.copy_(theta_C4096)
        rows = [None] * len(weights) if rows is None else rows
        folding.fold_into(
            out, theta_C4096, weights, payloads, rows, layout, step, judge=judge, landing=landing, threads=threads
        )
        return out

    def give_back(self, residual_C4096: Tensor, payload: Payload) -> None:
        """Add a payload that missed its final set to the residual: late work is late, never lost."""
        folding.give_back(residual_C4096, payload, self.layout(len(residual_C4096)))


def codec_of(name: str, k: int) -> Codec:
    """The codec of this name. Raises ConfigError for one that does not exist, or a k that it cannot have."""
    check_codec(name, k)
    return Codec(name, k)


# --- where a worker encodes ----------------------------------------------------------------------


class UnfinishedPayload(Protocol):
    """A payload that is filled chunk by chunk."""

    def fill(
        self, at: int, residual_C4096: Tensor, anchor_C4096: Tensor, local: Tensor | Blocks, beta: float
    ) -> None:
        """Fill its chunks from `at` on with β·e + (anchor − local); e becomes what was not sent.

        All three are float32, contiguous, on the encoder's device and sound: only then is nothing lost. Rows of
        local weights are of all rows of e and the anchor. Blocks are for an encoder that reads them, and not for a
        layout with a table: they name rows of e and the anchor, become the anchor, and e has no padding. Raises
        Divergence for a residual that is not finite.
        """

    def whole(self) -> bytearray:
        """The payload, when all chunks are filled."""


class Encoder(Protocol):
    """Makes payloads on one device."""

    @property
    def device(self) -> torch.device:
        """Device of e, the anchor and the rows of local weights."""

    @property
    def threads(self) -> int:
        """Number of threads that may call at once, each for slabs of its own."""

    @property
    def slab_chunks(self) -> int:
        """Most chunks that one call should be given."""

    @property
    def reads_blocks(self) -> bool:
        """Whether local weights may be given as blocks, where they stand."""

    def is_sound(self, local: Tensor | Blocks) -> bool:
        """Whether float32 values can be encoded: no NaN, nothing from 2⁶⁴ on."""

    def begin(self, layout: Layout, tensor_C: Sequence[int] | None = None) -> UnfinishedPayload:
        """Begin a payload of this layout.

        `tensor_C`: number of the tensor of each chunk, for a layout with a table. With one, e is what was not sent
        only after `whole`, and may have values in its padding.
        """


class OnHost:
    """The CPU's encoder, of any codec."""

    device = HOST
    reads_blocks = True

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.slab_chunks = max(1, SLAB_CHUNKS // threads)

    def is_sound(self, local: Tensor | Blocks) -> bool:
        return encoding.is_sound(local)

    def begin(self, layout: Layout, tensor_C: Sequence[int] | None = None) -> UnfinishedPayload:
        return lookup_encoding.LookupPayload(layout, tensor_C) if layout.has_table else _HostPayload(layout)


class _HostPayload:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bytes = encoding.blank_payload(layout)

    def fill(
        self, at: int, residual_C4096: Tensor, anchor_C4096: Tensor, local: Tensor | Blocks, beta: float
    ) -> None:
        encoding.encode_rows(self._bytes, self._layout, at, residual_C4096, anchor_C4096, local, beta)

    def whole(self) -> bytearray:
        return self._bytes
