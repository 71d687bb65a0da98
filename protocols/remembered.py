"""What an immutable object found about itself once, and remembers."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

V = TypeVar("V")


class remembered(Generic[V]):
    """`functools.cached_property` without its lock, which costs more than most of what is found in pure machines.

    Two threads may both find a value: both get the first one that was kept. The object needs a `__dict__`.
    """

    def __init__(self, find: Callable[[Any], V]) -> None:
        self._find, self.__doc__ = find, find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, one: None, owner: type) -> "remembered[V]": ...

    @overload
    def __get__(self, one: object, owner: type) -> V: ...

    def __get__(self, one: object | None, owner: type) -> "V | remembered[V]":
        if one is None:
            return self
        # From now on Python reads it there, and does not come here again.
        found: V = one.__dict__.setdefault(self._name, self._find(one))
        return found
