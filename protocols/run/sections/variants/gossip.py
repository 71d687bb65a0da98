"""`outer.gossip`: within a round members pull from neighbours; its fold merges all (docs/gossip-merge.md)."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.payload import DENSE_BLOCK, payload_bytes
from atoll.protocols.run.sections.refusals import Refusal, refuse

MOST_BYTES = 256 << 20
"""Largest payload of a pull: the daemons at both ends have it in memory while it moves."""


class GossipSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When members pull from neighbours. The defaults are 0.2 neighbours a tick on average, most of them late."""

    steps: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    """Inner steps from one tick to the next; the end of a round is none: its fold merges all."""
    first_256: Annotated[int, Meta(ge=0, le=256)] = 0
    """Chance that a pair pulls at the first tick of a round."""
    last_256: Annotated[int, Meta(ge=0, le=256)] = 102
    """The same at the last tick; between them it is linear."""

    def ticks(self, steps: int) -> int:
        """Ticks of a round of so many inner steps."""
        return (steps - 1) // self.steps

    def chance(self, tick: int, ticks: int) -> tuple[int, int]:
        """Chance of a pair at `tick`, 1 … `ticks`, as numerator and denominator; later ticks are as the last."""
        if tick >= ticks:
            return self.last_256, 256
        most = ticks - 1
        return self.first_256 * (most - tick + 1) + self.last_256 * (tick - 1), 256 * most


_REFUSED: tuple[Refusal, ...] = (
    (
        "inner.optimizer spsa",
        lambda spec: spec.inner.optimizer == "spsa",
        "a contribution is scalars along own directions, and mixed weights have none",
    ),
    ("reduce", lambda spec: spec.reduce is not None, "reducers need sparse2; set it to null"),
    (
        "compress.codec",
        lambda spec: spec.compress.codec not in DENSE_BLOCK,
        "a value that a neighbour did not send is not 0; use int8 or e3m0",
    ),
    (
        "compress.feedback_rule",
        lambda spec: bool(spec.compress.feedback_rule),
        "its memory is of a member's own steps",
    ),
    (
        "outer.overlap_steps",
        lambda spec: bool(spec.outer.overlap_steps),
        "weights ahead of a fold have no base in common; set it to 0",
    ),
    ("outer.fragments", lambda spec: spec.outer.fragments > 1, "neighbours pull whole models; set it to 1"),
    ("outer.holders", lambda spec: bool(spec.outer.holders), "neighbours train other experts"),
    (
        "outer.aggregate",
        lambda spec: bool(spec.outer.aggregate),
        "a rule judges what each member did, and a contribution has the work of several",
    ),
    (
        "audit",
        lambda spec: bool(spec.audit),
        "an audit asks what a member's own windows improve, and a contribution has the work of several",
    ),
    (
        "pace.excise_rounds",
        lambda spec: spec.pace.excise_rounds is not msgspec.UNSET,
        "a member's work is in the contributions of others too",
    ),
)


def check_gossip(spec: Any) -> None:
    """Raise ConfigError for a RunSpec whose settings do not go with its gossip."""
    gossip = spec.outer.gossip
    if not gossip:
        return
    refuse(spec, "outer.gossip", _REFUSED)
    most = max(stage.steps for stage in spec.outer.stages)
    if not gossip.ticks(most):
        raise ConfigError(
            f"outer.gossip.steps = {gossip.steps}: no round has a tick before its end, at step {most}",
            hint="a lower number, or longer rounds in outer.stages",
        )
    size = payload_bytes(spec.compress.codec, arena_of(spec.model).chunks, spec.compress.k)
    if size > MOST_BYTES:
        raise ConfigError(f"outer.gossip: a pull of {size} bytes is above {MOST_BYTES}: the model is too large")
    if not gossip.first_256 and not gossip.last_256:
        raise ConfigError("outer.gossip needs first_256 or last_256 above 0: else nobody pulls")
