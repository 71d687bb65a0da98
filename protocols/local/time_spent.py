"""The worker's account of its time, which comes with every reply, and what the node's status shows of it."""

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


class TimeShares(msgspec.Struct, kw_only=True):
    """Seconds of the worker by activity. They add up to the time that they cover; mutable, for the account."""

    steps_s: float = 0.0
    """Seconds in inner steps whose result was used."""
    wait_s: float = 0.0
    """Seconds idle: waiting for other members, a quorum or finality, or paused."""
    transfer_s: float = 0.0
    """Seconds idle while payloads were in transfer: ours to the first peer, or those of peers to us."""
    encode_s: float = 0.0
    """Seconds encoding contributions."""
    fold_s: float = 0.0
    """Seconds folding, and checking payloads and the states of other members."""
    checkpoint_s: float = 0.0
    """Seconds saving checkpoints."""
    evaluate_s: float = 0.0
    """Seconds computing the validation loss."""
    audit_s: float = 0.0
    """Seconds auditing contributions of others."""
    recompute_s: float = 0.0
    """Seconds in inner steps that were thrown away, by a newer round or by the end of the worker."""
    start_s: float = 0.0
    """Seconds loading the worker: program, model, data and checkpoint."""
    down_s: float = 0.0
    """Seconds without a worker."""


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's time by activity, lately and in total."""

    window_s: float
    """Seconds that `window` covers: about the last 10 minutes, or less after the start."""
    window: TimeShares
    """Time shares of the last `window_s` seconds."""
    total: TimeShares
    """Time shares since the start of the daemon."""
