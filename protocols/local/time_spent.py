"""The worker's account of its time, which comes with every reply."""

import msgspec

ENTRIES = ("start", "steps", "encode", "fold", "checkpoint", "evaluate", "audit", "recompute", "wait")
"""Activities of a worker; at each moment it is busy with exactly one."""


class TimeSpent(msgspec.Struct, frozen=True, array_like=True):
    """Nanoseconds of the worker's life by activity. All fields up to `wait_ns` add up to its age."""

    start_ns: int = 0
    """Loading program, model, data and checkpoint."""
    steps_ns: int = 0
    """Time in inner steps."""
    encode_ns: int = 0
    """Encoding contributions."""
    fold_ns: int = 0
    """Serving fold, check, verify, finalize and adopt requests."""
    checkpoint_ns: int = 0
    """Saving generations and snapshots, without the time a background thread waits for the disk."""
    evaluate_ns: int = 0
    """Evaluating the view."""
    audit_ns: int = 0
    """Auditing contributions of others."""
    recompute_ns: int = 0
    """Inner steps that were thrown away."""
    wait_ns: int = 0
    """Idle: no request to serve."""
    unsaved_ns: int = 0
    """The part of `steps_ns` whose result is not saved yet."""
    each_step_ns: int = 0
    """The durations of all inner steps that were taken, those thrown away too; a part of the above."""
    step_counts: tuple[int, ...] = ()
    """How many inner steps took how long, in the buckets of `durations.STEP_BOUNDS_S`; empty before the first."""

    @property
    def age_ns(self) -> int:
        """Nanoseconds since the account was opened."""
        return sum(getattr(self, f"{entry}_ns") for entry in ENTRIES)
