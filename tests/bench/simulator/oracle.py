"""The oracle: reads what every node left behind, and says which promise was broken. Offline, from rows alone.

What a partition's losing side decided since the fork may be undone (docs/epochs.md): it is counted, and is no
violation. Where liars are a third of a round's voters, no rule holds from that round on: that is counted too.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.node.daemon.consensus.types import RECENT_ROUNDS
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import quorum
from atoll_bench.simulator.history import History, Row

BEHIND_MOST = 4
"""Rounds that final rounds may be behind the newest one in a quiet swarm."""


@dataclass(slots=True)
class Verdict:
    """What the oracle found."""

    violations: list[str] = field(default_factory=list)
    finals: int = 0
    """Rounds that are final in the common chain."""
    undone: int = 0
    """Final rounds of nodes that left their chain, since the fork."""
    stranded: int = 0
    """Nodes at the end that lack what died with others (docs/epochs.md): they need a checkpoint to go on."""
    outvoted: bool = False
    """A third or more of those that run at the end, or of the voters that did not leave, lie: they can stop
    finality."""
    is_behind: bool = False
    """Nodes have no final round near the newest one."""
    owned: int | None = None
    """First round of whose voters a third or more lie: nothing is judged from there on."""


def judge(
    histories: Sequence[History], newest: int, goes_on: bool, began: Mapping[int, float] | None = None
) -> Verdict:
    """The verdict. `newest`: the newest round that any node began; `goes_on`: rounds began until the end.

    `began`: when the first node began each round, in virtual seconds.
    """
    verdict = Verdict()
    honest = [history for history in histories if not history.is_liar]
    liars = {history.peer for history in histories if history.is_liar}
    verdict.owned = min(_owned(honest, liars), default=None)
    limit = newest + 1 if verdict.owned is None else verdict.owned
    verdict.violations += _forks(honest, limit)
    verdict.violations += [line for history in honest for line in _own_log(history, limit)]
    verdict.violations += _exclusions(honest, limit, began or {})
    votes = frozenset[tuple[PeerId, PeerId]]().union(*(history.votes_against for history in histories))
    verdict.violations += [line for history in honest for line in _voted_out(history, limit, votes)]
    verdict.violations += _false_blame(honest, liars)
    verdict.undone = sum(_undone(history.rows) for history in honest)
    verdict.stranded = sum(history.is_stranded for history in honest)
    running = [history for history in histories if history.is_up]
    gone = {peer for history in honest for row in history.rows for peer in row.excluded}
    gone.update(*(history.by_owner for history in honest))
    electorates = [history.voting for history in running if not history.is_liar]
    electorates.append(tuple(history.peer for history in running if history.peer not in gone))
    verdict.outvoted = any(3 * len(liars.intersection(peers)) >= max(1, len(peers)) for peers in electorates)
    if verdict.owned is None and not verdict.stranded and not verdict.outvoted:
        here = [one for one in honest if one.is_up and one.peer not in gone]
        behind = _behind(here)
        verdict.is_behind = bool(behind)
        verdict.violations += [*_end(here, goes_on), *behind]
    verdict.finals = 1 + max((history.applied for history in honest if history.is_up), default=-1)
    return verdict


def _short(peer: PeerId) -> str:
    return f"…{peer[-6:]}"


def _owned(honest: Iterable[History], liars: set[PeerId]) -> Iterable[int]:
    rows = (row for history in honest for row in history.rows if row.kind == "final")
    return (row.round for row in rows if 3 * len(liars.intersection(row.voters)) >= len(row.voters))


def _forks(honest: Iterable[History], limit: int) -> list[str]:
    """One set and one state of each round in one epoch, whoever decided it."""
    found: list[str] = []
    seen: dict[tuple[bytes, int], tuple[PeerId, Row]] = {}
    for history in honest:
        for row in history.rows:
            if row.kind == "final" and row.round < limit:
                peer, first = seen.setdefault((row.epoch, row.round), (history.peer, row))
                what = _difference(first, row)
                if what:
                    found.append(f"round {row.round}: {what}, at {_short(peer)} and {_short(history.peer)}")
    return found


def _difference(one: Row, other: Row) -> str:
    if one.names != other.names:
        return "two final sets"
    if one.state != other.state:
        return "two states of one set"
    return "" if one.excluded == other.excluded else "not the same members excluded"


def _chains(history: History, limit: int) -> Iterator[tuple[Row, dict[int, Row]]]:
    """Each final row of the log, with those before it in its chain, by round."""
    before: dict[int, Row] = {}
    for row in history.rows:
        if row.kind == "other_chain":
            before = {at: one for at, one in before.items() if at < row.round}
        elif row.kind == "final" and row.round < limit:
            yield row, before
            before = {**before, row.round: row}


def _exclusions(honest: Sequence[History], limit: int, began: Mapping[int, float]) -> list[str]:
    """No final set has work of an excluded member beside work of others."""
    found: list[str] = []
    by_owner = {history.peer: history.by_owner for history in honest}
    barred = frozenset[PeerId]().union(*by_owner.values())
    for history in honest:
        for row, before in _chains(history, limit):
            # With the first set of an epoch the epoch before may have decided the round, without the exclusion.
            if row.round - 1 in before and before[row.round - 1].epoch == row.epoch:
                voted_out = {peer for number, one in before.items() if number < row.round for peer in one.excluded}
                known = [by_owner[peer] for peer in row.voters if peer in by_owner]
                told = {peer for peer in row.authors & barred if _all_knew(known, peer, row.round, began)}
                counted = row.authors - voted_out - told
                found += [
                    f"round {row.round} of {_short(history.peer)} has work of {_short(peer)}, which is excluded"
                    for peer in sorted(row.authors - counted if counted else ())
                ]
    return found


def _all_knew(
    known: Sequence[Mapping[PeerId, tuple[tuple[int, float], ...]]],
    peer: PeerId,
    number: int,
    began: Mapping[int, float],
) -> bool:
    """Whether all honest voters had the owner's exclusion before anybody began the round."""
    # Before that a quorum that lacks the record may have voted for a set with the work, and all follow that set.
    at = began.get(number, -1.0)
    return bool(known) and all(any(r <= number and t < at for r, t in one.get(peer, ())) for one in known)


def _voted_out(history: History, limit: int, votes: Collection[tuple[PeerId, PeerId]]) -> list[str]:
    """Whom a final round excludes is there, and had the votes of two thirds of its authors and of those before."""
    found: list[str] = []
    for row, before in _chains(history, limit):
        recent = [one.authors for at, one in before.items() if row.round - RECENT_ROUNDS <= at < row.round]
        needed = quorum(len(row.authors.union(*recent)))
        for peer in row.excluded:
            many = sum((author, peer) in votes for author in row.authors)
            if many < needed or peer not in row.authors:
                what = f"with {many} of {needed} votes" if peer in row.authors else "though it is away"
                found.append(f"round {row.round} of {_short(history.peer)} excludes {_short(peer)} {what}")
    return found


def _own_log(history: History, limit: int) -> list[str]:
    """Rounds become final one after the other; what was final stays so until the node leaves its chain."""
    found: list[str] = []
    who, last = _short(history.peer), -1
    finals: dict[int, tuple[Digest, ...]] = {}
    for row in history.rows:
        if row.round >= limit and row.kind != "other_chain":
            continue
        if row.kind == "diverged":
            found.append(f"{who} has another state of round {row.round} than its certificate")
        elif row.kind == "other_chain":
            finals = {at: names for at, names in finals.items() if at < row.round}
            last = -1
        elif row.kind == "final":
            if row.round != last + 1:
                found.append(f"{who} went from final round {last} to {row.round}")
            if finals.setdefault(row.round, row.names) != row.names:
                found.append(f"{who} has another final set of round {row.round}, which its chain keeps")
            last = row.round
    if len(history.announced) != len(set(history.announced)):
        found.append(f"{who} contributed twice to a round")
    return found


def _false_blame(honest: Iterable[History], liars: set[PeerId]) -> list[str]:
    peers = {history.peer for history in honest}
    accused = [
        f"{_short(history.peer)} accuses {_short(row.peer)}, which is honest, in round {row.round}"
        for history in honest
        for row in history.rows
        if row.kind == "accused" and row.peer in peers
    ]
    forked = {peer for history in honest for peer in history.forked if peer not in liars}
    return accused + [f"{_short(peer)} is honest and forked its feed" for peer in sorted(forked)]


def _undone(rows: Iterable[Row]) -> int:
    many, finals = 0, set[int]()
    for row in rows:
        if row.kind == "final":
            finals.add(row.round)
        elif row.kind == "other_chain":
            many += sum(at >= row.round for at in finals)
            finals = {at for at in finals if at < row.round}
    return many


def _end(here: Iterable[History], goes_on: bool) -> list[str]:
    """After the quiet end all that run go on in one chain."""
    found = [] if goes_on else ["training stopped"]
    if len({history.chain for history in here}) > 1:
        sides: dict[tuple[bytes, ...], list[str]] = {}
        for history in here:
            sides.setdefault(history.chain, []).append(f"{_short(history.peer)}@{history.applied}")
        found.append("not one chain in the end: " + " | ".join(" ".join(side) for side in sides.values()))
    return found


def _behind(here: Sequence[History]) -> list[str]:
    """Rounds become final as they are trained."""
    common = sorted(history.round for history in here)[(len(here) - 1) // 2] if here else 0
    behind = [history for history in here if history.applied < common - BEHIND_MOST]
    names = " ".join(f"{_short(history.peer)}@{history.applied}" for history in behind)
    return [f"{len(behind)} of {len(here)} have no final round near round {common}: {names}"] if behind else []
