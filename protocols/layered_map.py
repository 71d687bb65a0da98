"""An immutable mapping whose copy with one more entry is cheap: both share all but the newest entries.

States of pure machines are replaced, never changed. A plain dict in one is copied for each entry that comes, so
what one author writes would cost the square of its records.
"""

from collections.abc import Iterator, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
PLAIN = 64
"""Up to so many entries a plain dict is as fast."""


class LayeredMap(Mapping[K, V]):
    """A large dict that is shared, and a small one of what came since. Nobody changes either."""

    __slots__ = ("_base", "_newest")

    def __init__(self, base: Mapping[K, V], newest: Mapping[K, V]) -> None:
        self._base, self._newest = base, newest

    def __getitem__(self, key: K) -> V:
        return self._newest[key] if key in self._newest else self._base[key]

    def __contains__(self, key: object) -> bool:
        return key in self._newest or key in self._base

    def __iter__(self) -> Iterator[K]:
        yield from self._base
        yield from (key for key in self._newest if key not in self._base)

    def __len__(self) -> int:
        return len(self._base) + sum(key not in self._base for key in self._newest)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LayeredMap) and self._base is other._base and self._newest == other._newest:
            return True
        return isinstance(other, Mapping) and len(self) == len(other) and self._joined() == {**other}

    __hash__ = None  # type: ignore[assignment]

    def put(self, key: K, value: V) -> "LayeredMap[K, V]":
        """The mapping with one more entry, or another value."""
        after = LayeredMap(self._base, {**self._newest, key: value})
        # The newest entries are copied each time, and all of them once in as many times.
        return LayeredMap(after._joined(), {}) if len(after._newest) ** 2 > len(self._base) else after

    def _joined(self) -> dict[K, V]:
        return {**self._base, **self._newest}


def plain(mapping: Mapping[K, V]) -> dict[K, V]:
    """A copy of all as a plain dict, which may be changed."""
    return mapping._joined() if type(mapping) is LayeredMap else {**mapping}


def put(mapping: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """The mapping with one more entry, or another value; the given one stays as it is."""
    if type(mapping) is LayeredMap:  # `isinstance` asks an abstract class, and this is called for each entry
        return mapping.put(key, value)
    return {**mapping, key: value} if len(mapping) < PLAIN else LayeredMap(mapping, {key: value})
