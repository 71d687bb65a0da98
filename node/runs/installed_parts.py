"""Parts of a run that installed packages bring, found by entry points: terms of the loss, and models.

    [project.entry-points."atoll.objectives"]
    "variance.1" = "their_package.module:Variance"
    [project.entry-points."atoll.models"]
    "lanes.1" = "their_package.module:Lanes"

The values are a `Factory` of node/learning/objectives/interface.py, and of node/learning/plugged/interface.py.
"""

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from atoll.node.config.roles import Work
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.objective import BUILT_IN

Kind = Literal["objective", "model"]


def check_installed(spec: RunSpec, work: Work) -> None:
    """Raise ConfigError if a node cannot do its work in a run, because it lacks a package. Nothing is loaded.

    Members that train need a term's; the model is built wherever there is a worker.
    """
    if spec.objective and spec.objective.name not in BUILT_IN and work.trains:
        entry_of("objective", spec.objective.name, spec.objective.package or "")
    if spec.model.plugin and work.has_model:
        entry_of("model", spec.model.plugin.name, spec.model.plugin.package)


def entry_of(kind: Kind, name: str, package: str = "") -> EntryPoint:
    """The entry point of a part that is not built in. Raises ConfigError if no package, or several, have it."""
    found = tuple(entry_points(group=f"atoll.{kind}s", name=name))
    if not found:
        raise ConfigError(
            f"the run needs the {kind} {name}, which is not installed here",
            hint=f"if you trust the package {package or 'that brings it'}, install it and start again",
        )
    if len({entry.value for entry in found}) > 1:
        owners = ", ".join(sorted({entry.dist.name for entry in found if entry.dist}))
        raise ConfigError(f"several installed packages bring {name}: {owners}", hint="remove all but one")
    return found[0]


def loaded(kind: Kind, name: str, package: str = "") -> Any:
    """What the entry point names; it runs the package's code. Raises ConfigError as `entry_of`, or if it fails."""
    entry = entry_of(kind, name, package)
    owner = package or (entry.dist.name if entry.dist else "its package")
    try:
        return entry.load()
    except Exception as error:  # of other people's modules, which may raise anything
        raise ConfigError(
            f"{kind} {name} of {owner} does not load: {type(error).__name__}: {error}",
            hint=f"repair or reinstall {owner}, then start again",
        ) from error
