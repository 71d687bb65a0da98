"""How far the work is that keeps a node from training: from the worker while it starts, and in the status."""

import msgspec


class StartProgress(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """A worker that starts begins a phase of its start. Carries its request's id."""

    phase: str
    """What it does, as people read it."""


class WorkProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Work that keeps the node from training, and how far it is."""

    work: str
    """What is under way."""
    done_bytes: int | None = None
    """Bytes that are here; null where only time is known."""
    of_bytes: int | None = None
    """All bytes; null where nobody can tell before the end."""
    took_s: float
    """Seconds since it began."""
    left_s: float | None
    """Seconds to its end, at the pace so far or as long as it took last time; null: unknown."""


class RateNow(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run is in the schedule of its learning rate."""

    rate: float
    """The learning rate of the inner step at hand."""
    phase: str
    """`warm-up`, `stable`, `decay`, `cosine`, or `at its least` after the end of the schedule."""
    step: int
    """Inner step of the run, from 0."""
    until: int | None
    """The step at which the next part begins, or the schedule ends; null: none follows."""
