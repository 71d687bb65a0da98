"""Tables that peers fill: the oldest entry goes when there is one too many."""

from collections import Counter, OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_newest(table: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Store `key` as the newest; the oldest of more than `most` is dropped."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > most:
        table.popitem(last=False)


class NewestCounts(Counter[K]):
    """Counts of the `most` keys that counted last. `total` is that of all keys that ever did."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most, self._total = most, 0

    def __setitem__(self, key: K, count: int) -> None:
        self._total += count - self.pop(key, 0)
        super().__setitem__(key, count)
        if len(self) > self._most:
            del self[next(iter(self))]

    def total(self) -> int:
        """Return what was counted of all keys, also of those that are forgotten."""
        return self._total
