"""The learning rate of an inner step: a warm-up, then a cosine, or a stable rate that decays at the end."""

import math

from msgspec import UNSET

from atoll.protocols.run.run_spec import InnerSpec


def learning_rate(inner: InnerSpec, step: int) -> float:
    """Learning rate of the run's inner step `step`, from 0; `lr · lr_min` after `total_steps`.

    Linear warm-up. Then half a cosine; or, with `decay_256`, the peak rate, and in that share of the steps, the
    last ones, 1 − √t of it, where t goes from 0 to 1 (Hägele et al., arXiv 2405.18392).
    """
    step += inner.first_step
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    if inner.decay_256 is UNSET:
        share = (1 + math.cos(math.pi * _done(step, inner.warmup_steps, inner.total_steps))) / 2
    elif inner.decay_256:
        share = 1 - math.sqrt(_done(step, inner.total_steps - inner.decay_steps, inner.total_steps))
    else:
        share = 1.0
    return inner.lr * (inner.lr_min + (1 - inner.lr_min) * share)


def _done(step: int, first: int, end: int) -> float:
    """Share of the steps from `first` to `end` that were taken before `step`, in 0 … 1."""
    return min(1.0, max(0.0, (step - first) / max(1, end - first)))
