"""Experts of a mixture, and bitmaps of experts, which say what a contribution covers and a member trains.

Each set of experts has exactly one bitmap: bit e % 8 of byte e // 8 is expert e. The set of all experts is the
empty string, so that runs whose members train everything send no bitmaps.
"""

from collections.abc import Iterable
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError, DecodeError, check_range

MAX_EXPERTS = 4096
Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 22)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
ALL = b""
"""The bitmap of all experts."""


class ExpertsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mixture of experts as every layer's feed-forward, routed token by token; no token is dropped."""

    count: Annotated[int, Meta(ge=1, le=MAX_EXPERTS)]
    """Number of experts with parameters (E)."""
    per_token: Annotated[int, Meta(ge=1)]
    """Number of slots that each token chooses (k)."""
    ffn: Size
    """Width of one expert."""
    normalise: bool = True
    """Whether the k weights of a token are divided by their sum (`norm_topk_prob`)."""
    zero: Annotated[int, Meta(ge=0, le=MAX_EXPERTS)] = 0
    """Number of slots that return the token unchanged (zero-computation experts, arXiv 2509.01322)."""
    computed: Annotated[float, Meta(ge=0, le=MAX_EXPERTS)] | None = None
    """Target for the mean number of experts with parameters per token; None: `per_token`."""
    bias_rate: Share = 0.0
    """Step size of the controller of the choice bias; 0: there is no bias."""
    load_balance: Share = 0.01
    """Weight of the load-balance loss, mean over layers."""
    router_z: Share = 0.001
    """Weight of the router's z-loss, mean over layers."""

    @property
    def slots(self) -> int:
        """Number of slots that the router chooses from: experts 0 … E − 1, then the zero experts."""
        return self.count + self.zero

    def check(self) -> None:
        """Raise ConfigError, with the key's name, for values that no mixture can have."""
        check_range("model.experts.per_token", self.per_token, 1, self.slots)
        if self.computed is not None:
            check_range("model.experts.computed", self.computed, 0, min(self.per_token, self.count))
        if self.zero and (self.computed is None or not self.bias_rate):
            raise ConfigError("model.experts.zero needs model.experts.computed and model.experts.bias_rate")
        if not self.zero and self.computed is not None:
            raise ConfigError("model.experts.computed is for runs with model.experts.zero")


def bitmap_of(experts: Iterable[int], count: int) -> bytes:
    """Bitmap of a set of experts, each within 0 … `count` - 1."""
    bits = sum(1 << expert for expert in set(experts))
    return ALL if bits == (1 << count) - 1 else bits.to_bytes(_size(count), "little")


def experts_in(bitmap: bytes, count: int) -> frozenset[int]:
    """The set of experts of a legal bitmap."""
    if not bitmap:
        return frozenset(range(count))
    bits = int.from_bytes(bitmap, "little")
    return frozenset(expert for expert in range(count) if bits >> expert & 1)


def check_bitmap(bitmap: bytes, count: int) -> None:
    """Raise DecodeError unless `bitmap` is the legal form of a set of experts out of `count`."""
    if bitmap and (not count or len(bitmap) != _size(count) or int.from_bytes(bitmap, "little") + 1 >= 1 << count):
        raise DecodeError(f"not a bitmap of some of {count} experts")


def _size(count: int) -> int:
    return -(-count // 8)
