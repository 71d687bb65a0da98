"""How long to wait before the next try of something that failed: dials, DNS."""

import random

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0


def backoff_s(failures: int, rng: random.Random) -> float:
    """Wait after the `failures`-th failure in a row: doubles, capped, with ± 50 % jitter."""
    return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 16)) * rng.uniform(0.5, 1.5))
