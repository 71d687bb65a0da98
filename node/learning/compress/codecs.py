"""The one seam to the codecs: what a run compresses with, chosen by `RunSpec.compress`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from atoll.node.learning.compress import encoding, folding
from atoll.node.learning.compress.folding import OuterStep, Payload, Rows
from atoll.node.learning.kernels.compiled import fresh_like
from atoll.protocols.run.payload import Layout, check_codec


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
        return encoding.encode_residual(residual_C4096, anchor_C4096, local_C4096, beta, layout)

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
        threads: int = 1,
    ) -> Tensor:
        """θ + U, a new int32 array, of one round's set; `rows` where payloads cover some chunks only."""
        out, layout = fresh_like(theta_C4096), self.layout(len(theta_C4096))
        rows = [None] * len(weights) if rows is None else rows
        folding.fold_into(out, theta_C4096, weights, payloads, rows, layout, step, threads=threads)
        return out

    def give_back(self, residual_C4096: Tensor, payload: Payload) -> None:
        """Add a payload that missed its final set to the residual: late work is late, never lost."""
        folding.give_back(residual_C4096, payload, self.layout(len(residual_C4096)))


def codec_of(name: str, k: int) -> Codec:
    """The codec of this name. Raises ConfigError for one that does not exist, or a k that it cannot have."""
    check_codec(name, k)
    return Codec(name, k)
