"""What the user of a RouteHost chooses, and what its status page shows."""

from collections.abc import Callable
from dataclasses import dataclass

from atoll.p2p.host.endpoint import is_global
from atoll.p2p.nat import dialback
from atoll.p2p.nat.nat_calls import Probe
from atoll.p2p.nat.relay import RelayLimits, RelayStatistics
from atoll.protocols.ids import PeerId
from atoll.protocols.nat import Reach


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """Local choices."""

    announce: tuple[str, ...] = ()
    """Published instead of everything that we find out; for hosts behind a port forward that nobody can probe."""
    relay: RelayLimits | None = None
    """Relay for others inside these limits; None: do not."""
    relay_only: bool = False
    """Dial nobody but `trusted` peers, announce no address, punch no holes. Relays of others count as nobody."""
    trusted: frozenset[PeerId] = frozenset()
    """Seeds: dialled directly even with `relay_only`."""
    is_outside: Callable[[str], bool] = is_global
    """Whether an address could be dialled from anywhere; simulations have their own."""
    probe: Probe = dialback.answers


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """For the status page."""

    reach: Reach
    why: str
    observed: tuple[str, ...]
    relay: RelayStatistics | None
    clock_ahead_s: float | None
    """Median of how far peers' clocks are ahead of ours."""
