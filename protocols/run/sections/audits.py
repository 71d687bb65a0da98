"""Audits: members measure each other's contributions, and weights follow from what they found (docs/audits.md)."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.protocols.errors import ConfigError


class AuditSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How contributions are audited."""

    windows: Annotated[int, Meta(ge=8, le=1024)] = 16
    """Windows of each kind that an audit looks at: assigned ones, and random ones."""
    each: Annotated[int, Meta(ge=1, le=4)] | msgspec.UnsetType = msgspec.UNSET
    """Contributions of a round that each of its authors audits, as many as one carries verdicts; unset: one."""
    lag: Annotated[int, Meta(ge=1, le=64)] = 2
    """The weights of a round follow from the sets up to so many rounds before it."""
    memory: Annotated[int, Meta(ge=4, le=256)] = 32
    """So many rounds are looked back at: what was found about earlier ones does not count."""
    voters: bool | msgspec.UnsetType = msgspec.UNSET
    """Who decides rounds must have shown work by final verdicts; unset: probation counts final sets alone."""
    newcomers: Annotated[int, Meta(ge=1, le=512)] | msgspec.UnsetType = msgspec.UNSET
    """Authors that may not decide whom one final set names at most, or as many as others; unset: any number."""
    by_payload: bool | msgspec.UnsetType = msgspec.UNSET
    """Members that name one payload share the largest weight among them; unset: each has a part of its own."""

    @property
    def per_round(self) -> int:
        """Audits of one member in one round, and of one contribution where the round has enough authors."""
        return self.each or 1


def check_audit(spec: Any) -> None:
    """Refuse audits in a RunSpec whose contributions have a part of the model."""
    if spec.audit and (spec.outer.holders or spec.outer.fragments != 1):
        raise ConfigError("audit needs contributions to the whole model: outer.holders 0 and outer.fragments 1")
    if spec.audit and spec.audit.newcomers and not spec.audit.voters:
        raise ConfigError("audit.newcomers needs audit.voters: else noise in enough final sets is new no more")
