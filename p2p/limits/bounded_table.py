"""Tables that peers fill: the oldest entry goes when there is one too many."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_newest(table: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store `key` as the newest; the oldest of more than `most` is dropped."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)
