"""Defences against members that lie: which ones a run has, and all that it can have (`run new --guard`).

What goes together is asked of the RunSpec itself, so that a rule which it gets later holds here too. Pure.
"""

from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from atoll.node.runs.presets import PROBATION
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sections.audits import AuditSpec
from atoll.protocols.run.sections.history import HistorySpec

PUZZLE_BITS = 20
"""Puzzle of a run that is made for strangers: some seconds of one core for each identity."""
NEWCOMERS = 16
"""Authors that may not decide yet whom one final set names, where it names fewer others."""
AUDITS = 3
"""Contributions of a round that each member of a guarded run audits."""
FEWEST, MOST = 8, 16
"""Windows of an audit in a guarded run."""
SAID: dict[str, Any] = {
    "outer.aggregate": "nnm",
    "outer.by_weight": True,
    "audit": AuditSpec(each=AUDITS),
    "audit.voters": True,
    "audit.newcomers": NEWCOMERS,
    "audit.by_payload": True,
    "pace.probation": PROBATION,
    "pace.probation_256": 64,
    "pace.excise_rounds": 50,
    "history": HistorySpec(),
}
"""By key of the RunSpec, what a guard sets; where two cannot go together, the first one counts. Summaries are no
defence against lies: they bound what the records of strangers take."""


class Defences(msgspec.Struct, frozen=True):
    """What a run does against members that lie; `rule` is empty and counts are 0 where it does nothing."""

    rule: str
    """`outer.aggregate`."""
    audits: int
    """Contributions of a round that each of its authors audits."""
    probation: int
    """Final sets with a member's work after which it decides rounds; 1: at once."""
    probation_256: int
    """Share of its weight that a member's work has until then."""
    excise_rounds: int
    puzzle_bits: int
    voters: bool = False
    """Whether who decides rounds must have shown work."""

    @property
    def judges(self) -> bool:
        """Whether bad updates lose weight; `edit` knows lengths only, and is no defence (docs/aggregation.md)."""
        return self.audits > 0 or self.rule not in ("", "edit")


def defences_of(spec: RunSpec) -> Defences:
    """What this run does against members that lie."""
    return Defences(
        rule=spec.outer.aggregate or "",
        audits=spec.audit.per_round if spec.audit else 0,
        probation=spec.probation,
        probation_256=spec.pace.probation_256 or 256,
        excise_rounds=spec.pace.excise_rounds or 0,
        puzzle_bits=spec.admission.puzzle_bits or 0,
        voters=bool(spec.audit and spec.audit.voters),
    )


def guarded(spec: RunSpec, given: Collection[str] = ()) -> RunSpec:
    """The run with every defence that it can have and does not have yet.

    `given`: keys that its owner has set, which stay. `reduce` goes, unless it was given or all can go with it.
    """
    given = {*given, *(key.split(".")[0] for key in given if key.startswith(("audit.", "reduce.")))}
    made = spec if "reduce" in given else replace(spec, reduce=None)
    for key in SAID:
        if key not in given and _value(made, key) is UNSET and not _obstacle(made, key):
            made = _with(made, key)
    reduced = replace(made, reduce=spec.reduce)
    return made if _refusal(reduced) else reduced


def windows_of(spec: RunSpec) -> int:
    """Windows of each kind with which an audit is cheap enough: where rounds are short, fewer than usual.

    Where Muon moves the layers verdicts are near the most that their windows can show, so half of the windows are
    enough (docs/audits.md). With others they show less, and 16 windows stay.
    """
    if spec.inner.optimizer != "muon":
        return MOST
    # A window of a step costs three forward passes, one of an audit four. So audits take half as long.
    steps = 3 * spec.steps(spec.outer.rounds - 1) * spec.inner.batch
    return max(FEWEST, min(MOST, steps // (2 * 4 * AUDITS)))


def left_out(spec: RunSpec) -> dict[str, str]:
    """By key, why the run cannot have a defence that it lacks."""
    reasons = {key: _obstacle(spec, key) for key in SAID if _value(spec, key) is UNSET}
    return {key: why for key, why in reasons.items() if why}


def _obstacle(spec: RunSpec, key: str) -> str:
    if key.startswith("audit.") and not spec.audit:
        return f"{key} is for runs with audit"
    return _refusal(_with(spec, key))


def _refusal(spec: RunSpec) -> str:
    """Why there is no such run; empty if there is."""
    try:
        spec.check()
    except ConfigError as error:
        return str(error)
    return ""


def _value(spec: RunSpec, key: str) -> Any:
    section, _, name = key.rpartition(".")
    return getattr(getattr(spec, section) if section else spec, name, UNSET)


def _with(spec: RunSpec, key: str) -> RunSpec:
    section, _, name = key.rpartition(".")
    change = {name: replace(SAID[key], windows=windows_of(spec)) if key == "audit" else SAID[key]}
    return replace(spec, **({section: replace(getattr(spec, section), **change)} if section else change))
