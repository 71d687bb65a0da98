"""When the members of a round should be done with their steps, from how long the nominal steps take each of them.

`median`: in the median of these times. `group`: FedCompass (Li et al., arXiv 2309.14675) gives a client steps
between Q_min and Q_max so that a group arrives together. Its fastest takes Q_max; a client is in the group if

    Q_min ≤ T / S_i ≤ Q_max        S_i: its seconds a step

A client that is in none opens another group, whose update is stale when it comes. Here a round is one group,
because work counts in its own round or in none (docs/decisions/0029-no-weights-for-staleness.md). So T is the time
at which the most members can be done. A member that is too slow for it leaves out sequences, one that is too fast
waits.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf, isfinite
from statistics import median

from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.run_spec import RunSpec

WHOLE_256 = 256
"""A share of one, in 256ths."""


def median_s(whole_s: Iterable[float]) -> float:
    """Seconds after which a round should be done, of the times `whole_s` of its nominal steps, at least one."""
    # The median, because one very slow or very fast member (or one that lies about its speed) must not set the
    # pace of all.
    return median(whole_s)


def group_s(whole_s: Iterable[float], least_256: int, most_256: int) -> float:
    """As `median_s`, but the time at which the most members are done with steps within the bounds.

    Of several such times it is one at which the fastest member of the group takes the most steps; of equally large
    groups, that of the fastest.
    """
    times = [each for each in whole_s if isfinite(each)]

    def members(done_s: float) -> int:
        return sum(least_256 * each <= WHOLE_256 * done_s <= most_256 * each for each in times)

    # A time between two of these ends has no more members than the next end. Of two groups of one size the fast
    # one counts: slow members can leave out sequences, fast ones can do nothing but wait. A lone liar is a group
    # of one.
    ends = [each * most_256 / WHOLE_256 for each in times]
    return max(ends, key=lambda end: (members(end), -end), default=inf)


def round_seconds(spec: RunSpec, lease: Lease) -> float:
    """Seconds that the nominal steps of its round take a member, by its lease; 0 while it announces no speed."""
    return spec.nominal_tokens(lease.round) / lease.tokens_per_s if lease.tokens_per_s > 0 else 0.0


def expected_seconds(
    spec: RunSpec, leases: Mapping[PeerId, Lease], untried: Collection[PeerId] = ()
) -> dict[PeerId, float]:
    """Seconds that its round takes each member; 0 while it announces no speed. `untried` ones set no time."""
    whole_s = {peer: round_seconds(spec, lease) for peer, lease in leases.items()}
    known = [each for peer, each in whole_s.items() if each > 0 and peer not in untried]
    if spec.pace.arrival != "group" or not known:
        return whole_s
    # A member that has taken the most steps before that time waits.
    done_s = group_s(known, spec.pace.least_256, spec.pace.most_256)
    return {peer: min(each * spec.pace.most_256 / WHOLE_256, done_s) for peer, each in whole_s.items()}
