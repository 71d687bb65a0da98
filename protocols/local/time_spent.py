"""The worker's account of its time, which comes with every reply."""

import msgspec


class TimeSpent(msgspec.Struct, frozen=True, array_like=True):
    """Nanoseconds of the worker's life by activity. All fields but the last add up to its age."""

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

    @property
    def age_ns(self) -> int:
        """Nanoseconds since the account was opened."""
        entries_ns: tuple[int, ...] = msgspec.structs.astuple(self)
        return sum(entries_ns) - self.unsaved_ns
