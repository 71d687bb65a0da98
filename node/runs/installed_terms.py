"""Terms of the loss that installed packages bring, found by entry points. Nothing is loaded here.

    [project.entry-points."atoll.objectives"]
    "variance.1" = "their_package.module:Variance"

The value is a `Factory` of node/learning/objectives/interface.py.
"""

from importlib.metadata import EntryPoint, entry_points

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.sections.objective import BUILT_IN, ObjectiveSpec

GROUP = "atoll.objectives"


def check_installed(wanted: ObjectiveSpec) -> None:
    """Raise ConfigError if a member cannot train with a term, because it lacks the package that brings it."""
    if wanted.name not in BUILT_IN:
        entry_of(wanted)


def entry_of(wanted: ObjectiveSpec) -> EntryPoint:
    """The entry point of a term that is not built in. Raises ConfigError if no package, or several, have it."""
    found = tuple(entry_points(group=GROUP, name=wanted.name))
    if not found:
        raise ConfigError(
            f"the run needs the objective {wanted.name}, which is not installed here",
            hint=f"if you trust the package {wanted.package}, install it and start again",
        )
    if len({entry.value for entry in found}) > 1:
        owners = ", ".join(sorted({entry.dist.name for entry in found if entry.dist}))
        raise ConfigError(f"several installed packages bring {wanted.name}: {owners}", hint="remove all but one")
    return found[0]
