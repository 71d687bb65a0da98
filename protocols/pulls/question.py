"""The question of wire `pull`: a member asks its neighbour for what it trained in this round so far.

The answer is a payload of the run's codec, of the one size that the RunSpec gives, or nothing. docs/wires/pull.md.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

QUESTION_MAX_BYTES = 32


class PullQuestion(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member asks the neighbour that it has at a tick."""

    round: Annotated[int, Meta(ge=0, le=1 << 24)]
    tick: Annotated[int, Meta(ge=1, le=1 << 20)]
