"""The learning rate of an inner step: linear warm-up, then half a cosine down to a fraction of the peak."""

import math

from atoll.protocols.run.run_spec import InnerSpec


def learning_rate(inner: InnerSpec, step: int) -> float:
    """Learning rate of global inner step `step`, from 0. After `total_steps` it stays at `lr · lr_min`."""
    step += inner.first_step
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    falling = max(1, inner.total_steps - inner.warmup_steps)
    done = min(1.0, (step - inner.warmup_steps) / falling)
    return inner.lr * (inner.lr_min + (1 - inner.lr_min) * (1 + math.cos(math.pi * done)) / 2)
