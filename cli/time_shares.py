"""Where time went, for people: shares in percent, the largest first."""

from collections.abc import Mapping
from typing import Any

import msgspec

from atoll.cli.formatting import span
from atoll.protocols.local.control_messages import Goodput, RoundStatus, TimeShares

WORTH_PERCENT = 0.05
"""Less than this would be printed as 0.0."""


def percents(shares: Mapping[str, Any]) -> dict[str, float]:
    """Each share of time in percent of all of them, by name without its unit; empty when no time went by."""
    seconds = {name.removesuffix("_s"): shares[name] for name in TimeShares.__struct_fields__}
    whole_s = sum(seconds.values())
    return {name: 100 * value_s / whole_s for name, value_s in seconds.items()} if whole_s > 0 else {}


def of_round(row: RoundStatus) -> str:
    """The share of a round's time in steps that count."""
    shares = percents(msgspec.structs.asdict(row))
    return f"{shares['steps']:.1f} %" if shares else "–"


def short(goodput: Goodput | None) -> str:
    """`93.1 %` of the last minutes; a dash when nothing is known."""
    shares = percents(msgspec.structs.asdict(goodput.window)) if goodput else {}
    return f"{shares['steps']:.1f} %" if shares else "–"


def line(goodput: Goodput | None) -> str:
    """`93.1 % of the last 10 m 00 s: wait 4.0, fold 1.9, encode 0.6`."""
    if goodput is None or goodput.window_s <= 0:
        return "–"
    shares = percents(msgspec.structs.asdict(goodput.window))
    del shares["steps"]
    rest = sorted(shares.items(), key=lambda share: -share[1])
    lost = ", ".join(f"{name} {percent:.1f}" for name, percent in rest if percent >= WORTH_PERCENT)
    return f"{short(goodput)} of the last {span(goodput.window_s)}" + (f": {lost}" if lost else "")
