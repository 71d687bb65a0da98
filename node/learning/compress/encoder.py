"""Where a worker encodes: what makes payloads, and on which device e and the anchor must lie for it.

On the host: compiled, by several threads. On a GPU: `compress.gpu.encoder`. Both give the same bytes and e.
"""

from typing import Protocol

import torch
from torch import Tensor

from atoll.node.learning.compress import encoding
from atoll.protocols.run.payload import Layout

HOST = torch.device("cpu")
SLAB_CHUNKS = 128
"""2 MiB of float32: what all threads of the host have at hand together, at the most one slab each."""


class UnfinishedPayload(Protocol):
    """A payload that is filled chunk by chunk."""

    def fill(
        self, at: int, residual_N4096: Tensor, anchor_N4096: Tensor, local_N4096: Tensor, beta: float
    ) -> None:
        """Fill its chunks from `at` on with β·e + (anchor − local); e becomes what was not sent.

        All three are float32, contiguous, on the encoder's device and sound: only then is nothing lost. Raises
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

    def is_sound(self, values_N4096: Tensor) -> bool:
        """Whether float32 rows can be encoded: no NaN, nothing from 2⁶⁴ on."""

    def begin(self, layout: Layout) -> UnfinishedPayload:
        """Begin a payload of this layout."""


class OnHost:
    """The CPU's encoder, of any codec."""

    device = HOST

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        self.slab_chunks = max(1, SLAB_CHUNKS // threads)

    def is_sound(self, values_N4096: Tensor) -> bool:
        return encoding.is_sound(values_N4096)

    def begin(self, layout: Layout) -> UnfinishedPayload:
        return _HostPayload(layout)


class _HostPayload:
    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bytes = encoding.blank_payload(layout)

    def fill(
        self, at: int, residual_N4096: Tensor, anchor_N4096: Tensor, local_N4096: Tensor, beta: float
    ) -> None:
        encoding.encode_rows(self._bytes, self._layout, at, residual_N4096, anchor_N4096, local_N4096, beta)

    def whole(self) -> bytearray:
        return self._bytes
