"""Back-off: how long to wait before the next try of something that failed, one rule for every retry loop."""

import random

FIRST_S = 1.0
MAX_S = 60.0


def backoff_s(
    failures: int,
    rng: random.Random | None = None,
    *,
    first_s: float = FIRST_S,
    max_s: float = MAX_S,
    jitter: float = 0.5,
) -> float:
    """Seconds to wait after the `failures`-th failure in a row (from 1): doubles from `first_s` up to `max_s`.

    With `rng`, the wait is multiplied by a random factor within 1 ± `jitter`, so that peers do not retry in step.
    """
    pause_s = min(max_s, first_s * 2.0 ** min(failures - 1, 16))
    return pause_s * rng.uniform(1 - jitter, 1 + jitter) if rng else pause_s
