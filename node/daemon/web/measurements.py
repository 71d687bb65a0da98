"""What the metrics have besides the status. Their library takes 13 ms of a start to import."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from atoll.protocols.local.control_messages import TimeShares
from atoll.protocols.local.durations import DurationCounts

SHARES = tuple(TimeShares.__struct_fields__)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Each function is called at a scrape."""

    model: Callable[[], str] = lambda: ""
    """The model of `atoll_run_info`."""
    durations: Mapping[str, DurationCounts] = field(default_factory=dict)
    """By the names of the metrics' HISTOGRAMS."""
    members_final: Callable[[], int | None] = lambda: None
    """Median of the newest final rounds in the live leases of others; None without others."""
    disk: Callable[[], tuple[int, int] | None] = lambda: None
    """Free bytes and all bytes of the home's file system."""
    loggers: Callable[[], Mapping[str, tuple[int, int]]] = dict
    """Events that each logger wrote, and events that it lost."""
