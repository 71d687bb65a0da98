"""`pace.stale`: slow members take whole rounds, and their work counts in a later one (docs/staleness.md)."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Round
from atoll.protocols.run.sections.refusals import Refusal, refuse

MAX_STALE = 64
"""Most rounds that the base of a contribution may be older than the round that it counts in."""


class StaleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Work whose base is older than its round, and what it weighs."""

    most: Annotated[int, Meta(ge=1, le=MAX_STALE)]
    """Rounds by which the base may be older. A member ends its steps early rather than exceed it."""
    weights: Literal["equal", "fedbuff", "fedfix"]
    """`equal`: what it claims. `fedbuff`: that / √(1 + age). `fedfix`: by how seldom its author is in time."""

    def counts_in(self, began: Round, final: int) -> Round:
        """The round that takes work that a member began in round `began`; `final`: its newest final one.

        It is the oldest round that is not final, and none before `began`. Beyond `most` it is one that is final:
        the work returns to its author's error feedback.
        """
        return Round(min(max(began, final + 1), began + self.most))


_REFUSED: tuple[Refusal, ...] = (
    ("reduce", lambda spec: spec.reduce is not None, "a reducer adds what contributions claim"),
    ("audit", lambda spec: bool(spec.audit), "an audit judges work by the weights of its own round"),
    ("outer.overlap_steps", lambda spec: spec.outer.overlap_steps > 0, "a late fold moves weights in training"),
    ("outer.fragments", lambda spec: spec.outer.fragments > 1, "a round exchanges one, and old work has all"),
    ("outer.holders", lambda spec: spec.outer.holders > 0, "holders change from round to round"),
    ("outer.gossip", lambda spec: bool(spec.outer.gossip), "neighbours pull what was trained from one base"),
    ("outer.merge", lambda spec: bool(spec.outer.merge), "a merged expert is not the one that work began from"),
    ("inner.optimizer spsa", lambda spec: spec.inner.optimizer == "spsa", "a round has directions of its own"),
    (
        "compress.feedback_rule econtrol",
        lambda spec: spec.compress.feedback_rule == "econtrol",
        "its estimates need members of equal weight",
    ),
    ("outer.rule average", lambda spec: spec.outer.rule == "average", "old work gives no mean of weights"),
    ("pace.least_256", lambda spec: spec.pace.least_256 < 256, "slow members would take fewer steps instead"),
)
_BY_SETS: tuple[Refusal, ...] = (
    ("history", lambda spec: bool(spec.history), "no summary holds who was in the newest sets"),
    (
        "pace.excise_rounds",
        lambda spec: bool(spec.pace.excise_rounds),
        "the member's work changed the weights of others",
    ),
)


def check_staleness(spec: Any) -> None:
    """Refuse work of an old base in a RunSpec with settings that it cannot work with. Raises ConfigError."""
    stale: StaleSpec | msgspec.UnsetType = spec.pace.stale
    if not stale:
        return
    if stale.most >= spec.outer.rounds:
        raise ConfigError("pace.stale.most must be below outer.rounds")
    refuse(spec, "pace.stale", _REFUSED)
    if stale.weights == "fedfix":
        refuse(spec, "pace.stale.weights fedfix", _BY_SETS)


def legal_age(stale: Any, number: int, age: int) -> bool:
    """Return whether a contribution to round `number` may have a base that is `age` rounds old.

    `stale`: the run's StaleSpec, or UNSET.
    """
    return bool(stale) and 1 <= age <= min(stale.most, number)
