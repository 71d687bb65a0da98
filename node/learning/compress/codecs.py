"""The one seam to the codecs: what a run compresses with, chosen by `RunSpec.compress`."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from atoll.node.learning.compress import encoding, folding
from atoll.node.learning.compress.folding import Member, OuterStep
from atoll.node.learning.kernels.large import fresh_like
from atoll.protocols.run.payload import Layout, check_codec


class Codec(NamedTuple):
    """A codec with its k; see `encoding` and `folding` for shapes and errors."""

    name: str
    k: int

    def layout(self, chunks: int) -> Layout:
        """Of a payload of so many chunks; `encoding.encode_rows` fills it part by part."""
        return Layout(self.name, chunks, self.k)

    def encode(
        self, residual_C4096: Tensor, anchor_C4096: Tensor, local_C4096: Tensor, beta: float, *, threads: int = 1
    ) -> bytes:
        """Payload of β·e + (anchor − local); the residual becomes what was not said."""
        arrays = residual_C4096, anchor_C4096, local_C4096
        return encoding.encode_residual(*arrays, beta, self.k, codec=self.name, threads=threads)

    def check(self, payload: bytes | memoryview, chunks: int) -> None:
        """Raise DecodeError unless these bytes are a legal payload."""
        folding.check(payload, chunks, self.k, codec=self.name)

    def onto(self, theta_C4096: Tensor, members: Sequence[Member], step: OuterStep, *, threads: int = 1) -> Tensor:
        """θ + U, a new array, of (weight, payload) of one round's set; padding is left to the caller."""
        out = fresh_like(theta_C4096)
        folding.fold_into(theta_C4096, members, self.k, step, out, codec=self.name, threads=threads)
        return out

    def give_back(self, residual_C4096: Tensor, payload: bytes | memoryview) -> None:
        """Add a payload that missed its final set to the residual: late work is late, never lost."""
        folding.give_back(residual_C4096, payload, self.k, codec=self.name)


def codec_of(name: str, k: int) -> Codec:
    """Raises ConfigError for a codec that does not exist, or a k that it cannot have."""
    check_codec(name, k)
    return Codec(name, k)
