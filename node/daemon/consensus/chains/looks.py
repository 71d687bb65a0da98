"""What was found at each place of a chain of epochs. Pure.

A run of months has thousands of epochs, and its node asks at each event: no place is looked at twice for nothing.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

V = TypeVar("V")
_first_of = attrgetter("first")


class ChainLink(Protocol):
    """One epoch of a chain. The first one begins the run, and none begins before the one that it continues."""

    @property
    def epoch(self) -> bytes:
        """Its id, a hash of the ones before it as well."""

    @property
    def first(self) -> int:
        """First round that it decides."""


def places_at(chain: Sequence[ChainLink], number: int) -> range:
    """Places of the epochs that begin at a round; more than one where the first ones decided nothing."""
    return range(begun_before(chain, number), begun_before(chain, number + 1))


def begun_before(chain: Sequence[ChainLink], number: int) -> int:
    """How many epochs of the chain, with the run's first one, begin before a round."""
    return bisect_left(chain, number, lo=1, key=_first_of)


class ChainLook(NamedTuple, Generic[V]):
    """What was found at the first places of a chain. It follows from the chain, and from what `stale` says."""

    end: bytes = b""
    """The epoch at the last of these places: a chain is known by its newest epoch."""
    places: int = 1
    """How many these are. Nothing is ever found at the run's first epoch."""
    found: Mapping[int, V] = {}
    """By place, where there is anything."""
    stale: frozenset[int] = frozenset()
    """Rounds of which something changed since."""

    def but(self, number: int) -> "ChainLook[V]":
        """The same after a change at a round: what was found at its places is looked at again."""
        return self._replace(stale=self.stale | {number})

    def along(self, chain: Sequence[ChainLink], count: int, find: Callable[[int], V | None]) -> "ChainLook[V]":
        """What there is at the first `count` places of a chain, of which `find` says what is at one."""
        is_prefix = self.places <= count and chain[self.places - 1].epoch == self.end
        if is_prefix and count == self.places and not self.stale:
            return self
        known, since = (self.found, self.places) if is_prefix else ({}, 1)
        old = [at for number in self.stale for at in places_at(chain, number) if at < since]
        again = [*old, *range(since, count)]
        looked = {at: value for at in again if (value := find(at)) is not None}
        kept = {at: value for at, value in known.items() if at not in old} if old else known
        return ChainLook(chain[count - 1].epoch, count, {**kept, **looked} if looked else kept)
