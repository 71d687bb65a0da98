"""Bitmaps of experts, which say what a contribution covers and a member trains; each set has exactly one form.

Bit e % 8 of byte e // 8 is expert e. The set of all experts is the empty string, so that runs whose members train
everything send no bitmaps.
"""

from collections.abc import Iterable

from atoll.protocols.errors import DecodeError

ALL = b""
"""The bitmap of all experts."""


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
