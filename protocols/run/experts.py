"""Which experts a contribution covers and a member trains: a bitmap with one form for each set.

Bit e % 8 of byte e // 8 is expert e. All experts are the empty string, so that a run whose members train
everything writes nothing about experts.
"""

from collections.abc import Iterable

from atoll.protocols.errors import DecodeError

ALL = b""


def bitmap_of(experts: Iterable[int], count: int) -> bytes:
    """The form of a set of experts, each within 0 … count - 1."""
    bits = sum(1 << expert for expert in set(experts))
    return ALL if bits == (1 << count) - 1 else bits.to_bytes(_size(count), "little")


def experts_in(bitmap: bytes, count: int) -> frozenset[int]:
    """The experts of a legal bitmap."""
    if not bitmap:
        return frozenset(range(count))
    bits = int.from_bytes(bitmap, "little")
    return frozenset(expert for expert in range(count) if bits >> expert & 1)


def check_bitmap(bitmap: bytes, count: int) -> None:
    """Raise DecodeError unless this is the one form of a set of experts of a model that has `count`."""
    if bitmap and (not count or len(bitmap) != _size(count) or int.from_bytes(bitmap, "little") + 1 >= 1 << count):
        raise DecodeError(f"not a bitmap of some of {count} experts")


def _size(count: int) -> int:
    return -(-count // 8)
