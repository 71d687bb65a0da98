"""`objective`: a term that members add to the loss of their steps, by name (docs/objectives.md).

The name has a version, because members whose terms differ would train two models into one. A term is found by its
name among those that are built in and those of packages that a member has installed: a run sends no code.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import RunId, digest
from atoll.protocols.run.sections.refusals import Refusal, refuse

NAME_PATTERN = r"^[a-z][a-z0-9_-]{0,31}\.[1-9][0-9]{0,3}\Z"
PACKAGE_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?\Z"
BUILT_IN: dict[str, dict[str, range]] = {"sigreg.1": {"directions": range(1, 4096 + 1)}}
"""Terms that every node has (node/learning/objectives), with their settings and the legal values of each."""
MAX_SETTINGS = 16
_SEED_BYTES = 8
_DOMAIN = b"atoll/objective/1\0"
_Key = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,31}\Z")]
_Number = Annotated[float, Meta(ge=-1e9, le=1e9)]


class ObjectiveSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One term: the loss of a step is its cross-entropy + `weight` · term."""

    name: Annotated[str, Meta(pattern=NAME_PATTERN)]
    """Name and version of the term, as in `sigreg.1`."""
    weight: Annotated[float, Meta(ge=1e-6, le=1000)]
    """λ, the factor of the term."""
    settings: Annotated[tuple[tuple[_Key, _Number], ...], Meta(max_length=MAX_SETTINGS)] = ()
    """The term's own settings, pairs of name and value by rising names; one left out has the term's default."""
    package: Annotated[str, Meta(pattern=PACKAGE_PATTERN)] | msgspec.UnsetType = msgspec.UNSET
    """Distribution that brings the term, for people who lack it; unset: it is built in."""


_REFUSED: tuple[Refusal, ...] = (
    (
        "inner.optimizer spsa",
        lambda spec: spec.inner.optimizer == "spsa",
        "its two losses are measured without the term's gradient",
    ),
    (
        "model.experts",
        lambda spec: spec.model.experts is not None,
        "the balance of a mixture already takes the one exchange that the parts of a step have",
    ),
)


def check_objective(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with its objective."""
    if not spec.objective:
        return
    names = [name for name, _ in spec.objective.settings]
    if names != sorted(set(names)):
        raise ConfigError("objective.settings must have each name once, in rising order")
    _check_built_in(spec.objective)
    refuse(spec, "objective", _REFUSED)


def _check_built_in(objective: ObjectiveSpec) -> None:
    """A package checks the settings of its own terms, where it is installed."""
    if (objective.name in BUILT_IN) == bool(objective.package):
        raise ConfigError(f"objective.package is for terms other than {', '.join(BUILT_IN)}, and they need it")
    for name, value in objective.settings if objective.name in BUILT_IN else ():
        legal = BUILT_IN[objective.name].get(name)
        if legal is None:
            known = ", ".join(BUILT_IN[objective.name])
            raise ConfigError(f"objective {objective.name} has no setting {name!r}, only {known}")
        if value not in legal:
            least, most = legal.start, legal.stop - 1
            raise ConfigError(
                f"objective {objective.name}: {name} = {value:g} is no whole number from {least} to {most}"
            )


def seed_of_step(run: RunId, step: int) -> int:
    """Seed, 64 bits, of what a term draws in a step; the same for all members, and nobody can choose it."""
    named = _DOMAIN + run + step.to_bytes(8, "little")
    return int.from_bytes(digest(named)[:_SEED_BYTES], "little")
