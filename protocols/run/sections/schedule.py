"""Checks of a learning rate that stays and then decays: the decay fits the run and ends with it."""

from typing import Any

from atoll.protocols.errors import ConfigError


def check_decay(spec: Any) -> None:
    """Refuse a RunSpec whose decay reaches into the warm-up, or does not end with the run's last inner step."""
    inner = spec.inner
    if not inner.decay_steps:
        return
    if inner.warmup_steps + inner.decay_steps > inner.total_steps:
        raise ConfigError(
            f"inner.decay_steps = {inner.decay_steps} is too long: the run has {inner.total_steps} inner steps,"
            f" of which inner.warmup_steps takes {inner.warmup_steps}",
            hint=f"set it to at most {max(0, inner.total_steps - inner.warmup_steps)}",
        )
    if inner.total_steps != spec.last_step:
        # A decay that the last round cuts off, or that ends before it, is a mistake in the number of rounds.
        raise ConfigError(
            f"inner.total_steps is {inner.total_steps}, but the run ends at inner step {spec.last_step}: with"
            " inner.decay_steps the learning rate falls in the run's last steps",
            hint="leave inner.total_steps out: it follows from outer.rounds",
        )
