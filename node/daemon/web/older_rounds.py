"""Thins out the rounds before the newest ones, so that the page's curves show the whole run. Pure."""

from collections.abc import Sequence
from itertools import accumulate
from statistics import fmean

from atoll.node.daemon.web.page_data import CurvePoint
from atoll.protocols.local.control_messages import RoundStatus

POINTS_MAX = 200
"""Most points of the older rounds together."""


def thin(rows: Sequence[RoundStatus], most: int = POINTS_MAX) -> tuple[CurvePoint, ...]:
    """At most `most` points for `rows`, oldest first, each for as many rounds as any other but the last."""
    tokens = list(accumulate(row.tokens for row in rows))
    size = max(1, -(-len(rows) // most))
    starts = range(0, len(rows), size)
    return tuple(_point(rows[start : start + size], tokens[min(start + size, len(rows)) - 1]) for start in starts)


def _point(rows: Sequence[RoundStatus], tokens: int) -> CurvePoint:
    losses = [row.train_loss for row in rows if row.train_loss is not None]
    found = [row.val_bpb for row in rows if row.val_bpb is not None]
    return CurvePoint(
        round=rows[-1].round,
        tokens=tokens,
        train_loss=fmean(losses) if losses else None,
        val_bpb=found[-1] if found else None,
    )
