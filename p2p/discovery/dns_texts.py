"""What a question for TXT records gives, whoever answers it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

LOOKUP_S = 4.0
"""For one question, all servers of the machine together."""


@dataclass(frozen=True, slots=True)
class Texts:
    """The TXT records of one name."""

    texts: tuple[bytes, ...]
    ttl_s: float


Lookup = Callable[[str], Awaitable[Texts]]
"""TXT records of a name. Raises Unreachable."""
