"""Tables of what a part of a RunSpec cannot go with, and the one line in which that is refused."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from atoll.protocols.errors import ConfigError

Refusal: TypeAlias = tuple[str, Callable[[Any], bool], str]
"""A key of a RunSpec, whether the RunSpec uses it, and why the part does not go with it."""


def refuse(spec: Any, part: str, refusals: Iterable[Refusal]) -> None:
    """Raise ConfigError for the first key of the table that a RunSpec with this part uses."""
    for key, is_used, why in refusals:
        if is_used(spec):
            raise ConfigError(f"{part} and {key} cannot go together: {why}")
