"""The oracle of real nodes: histories in, broken promises out. Pure; `homes` reads what it judges.

It trusts no node's word about another. What a node computed is compared with what all others computed and with the
ledger's certificate; what a node gave out is looked for in the node's own home.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, combinations, pairwise
from typing import NamedTuple

from atoll.cli.sim.homes import History
from atoll.node.daemon.certificates.certificate import Proven, gather, read_proof
from atoll.node.daemon.certificates.chosen_path import chosen_path
from atoll.node.daemon.consensus.chains.epochs import ROOT, EpochId
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import Digest, PeerId, short
from atoll.protocols.ledger.records import Contribution, Entry, Epoch, Follow, epoch_id
from atoll.protocols.local.control_messages import RoundStatus

Rows = dict[int, RoundStatus]
"""The last row of each round."""


class Violation(NamedTuple):
    """A broken promise; `text` names nodes and rounds."""

    promise: str
    text: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


class Verdict(NamedTuple):
    """What the oracle found."""

    violations: list[Violation]
    finals: int
    """Rounds that are final on at least one node."""
    folds: int
    """Final rounds whose digest a worker computed, over all nodes."""
    contributions: int
    """Contributions of these nodes that any ledger holds."""
    apart: int
    """Rounds that two nodes have final with two states because they are on two chains (docs/epochs.md)."""

    @property
    def line(self) -> str:
        """One line for people."""
        seen = f"{self.finals} final rounds, {self.folds} folds of workers, {self.contributions} contributions"
        return f"{seen}, {self.apart} rounds apart, {len(self.violations)} violations"


def judge(histories: Sequence[History]) -> Verdict:
    """The verdict over what all nodes of one run left behind, or as many of them as there are."""
    peers = {history.peer: history.name for history in histories}
    rows = {history.name: last_rows(history.rows) for history in histories}
    chains = {history.name: _chain(history) for history in histories}
    forks, apart = _forks(rows, chains)
    proofs = {history.name: _proof(history) for history in histories}
    each = chain.from_iterable(_own(history, rows[history.name], proofs[history.name]) for history in histories)
    excluded = _exclusions(proofs, chains)
    violations = [
        *forks, *_digests(rows), *each, *excluded, *_feeds(histories, peers), *_accused(histories, peers)
    ]  # fmt: skip
    return Verdict(
        violations,
        finals=len({number for of_node in rows.values() for number, row in of_node.items() if row.final}),
        folds=sum(bool(row.own_digest) for of_node in rows.values() for row in of_node.values()),
        contributions=sum(len(_contributions(history)) for history in histories),
        apart=apart,
    )


def last_rows(rows: Iterable[RoundStatus]) -> Rows:
    """The row of each round that counts."""
    return {row.round: row for row in rows}


class _Chain(NamedTuple):
    """The epochs of a node's chain, each with its first round."""

    path: tuple[Epoch, ...]

    def epoch_of(self, number: int) -> EpochId:
        """The epoch that decides this round."""
        return next((epoch_id(body) for body in reversed(self.path) if body.round <= number), ROOT)


def _chain(history: History) -> _Chain:
    return _Chain(chosen_path(((entry.author, entry.body) for entry in history.entries), history.peer))


def _forks(rows: dict[str, Rows], chains: dict[str, _Chain]) -> tuple[list[Violation], int]:
    """Final rounds with two sets or two states in one chain; and how many there are in two chains."""
    found: list[Violation] = []
    apart: set[int] = set()
    finals: dict[int, list[tuple[str, RoundStatus]]] = defaultdict(list)
    for name, of_node in rows.items():
        for number, row in of_node.items():
            if row.final:
                finals[number].append((name, row))
    for number, named in sorted(finals.items()):
        by_epoch: dict[EpochId, tuple[str, RoundStatus]] = {}
        for name, row in named:
            other, first = by_epoch.setdefault(chains[name].epoch_of(number), (name, row))
            if (row.set, row.digest) != (first.set, first.digest):
                found.append(Violation("no forked final rounds", f"round {number} of {other} and {name} differ"))
        if len({row.digest for _, row in by_epoch.values()}) > 1:
            apart.add(number)
    return found, len(apart)


def _digests(rows: dict[str, Rows]) -> Iterator[Violation]:
    """Equal sets give equal digests, computed by each worker from its own weights."""
    for name, of_node in rows.items():
        for number, row in of_node.items():
            # A set is made final only after the fold: until then the digest of the row is that of the view.
            if row.final and row.own_digest and row.own_digest != row.digest:
                text = f"round {number} of {name}: {row.own_digest[:8]}, certified {row.digest[:8]}"
                yield Violation("a worker computes the certified digest", text)


def _exclusions(proofs: dict[str, Proven | ConfigError | None], chains: dict[str, _Chain]) -> Iterator[Violation]:
    """What two nodes have final excludes the same members, as far as they are on one chain."""
    # Neither the set nor the state of a round depends on whom it excludes: no row would differ.
    known = {name: proof for name, proof in proofs.items() if isinstance(proof, Proven)}
    for (one, first), (other, second) in combinations(known.items(), 2):
        newest = min(first.round, second.round)
        parted = (int(body.round) - 1 for body in {*chains[one].path} ^ {*chains[other].path})
        last = min([newest, *parted]) + 1
        ours, theirs = ({at for at in each.excluded.items() if at[1] <= last} for each in (first, second))
        for peer, number in sorted(ours ^ theirs):
            text = f"{one} and {other} differ about {short(peer)} from round {number} on"
            yield Violation("all exclude the same members", text)


def _own(history: History, rows: Rows, proof: Proven | ConfigError | None) -> Iterator[Violation]:
    """What can be judged from one home alone."""
    name, saved = history.name, history.saved
    finals = sorted(number for number, row in rows.items() if row.final)
    for before, number in pairwise(finals):
        if number != before + 1:
            yield Violation("rounds become final in order", f"{name} has {before} and {number}, and none between")
    yield from _undone(history)
    if history.damage:
        yield Violation("what is saved can be read", f"{name}: {history.damage}")
    if saved is not None and saved.final in rows and rows[saved.final].final:
        row = rows[saved.final]
        if row.digest != saved.state.hex():
            yield Violation("saved weights are the final ones", f"{name}, round {saved.final}")
    yield from _uncertified(history, proof)
    yield from _lost_work(history, rows)


def _undone(history: History) -> Iterator[Violation]:
    """Final rounds that changed later, on a node that never left a chain."""
    moved = min((e.body.round for e in _own_entries(history) if isinstance(e.body, Epoch | Follow)), default=None)
    final: dict[int, str] = {}
    for row in history.rows:
        before = final.get(row.round)
        if before is not None and not (row.final and row.digest == before):
            if moved is None or row.round < moved:
                yield Violation("what is final stays final", f"{history.name}, round {row.round}")
            del final[row.round]
        if row.final:
            final[row.round] = row.digest


def _proof(history: History) -> Proven | ConfigError | None:
    """What the ledger proves of the saved round, or why it does not; None where nothing is saved."""
    saved = history.saved
    if saved is None or saved.final < 0:
        return None
    by_round: dict[int, list[Entry]] = defaultdict(list)
    for entry in history.entries:
        by_round[entry.body.round].append(entry)
    try:
        data = gather(
            history.spec,
            saved.final,
            lambda at: by_round[at],
            _chain(history).path,
            orphans_of=lambda at: [entry for entry in history.orphans if entry.body.round == at],
            equivocators=history.forked,
        )
        return read_proof(history.spec, data, history.name)
    except ConfigError as error:
        return error


def _uncertified(history: History, proof: Proven | ConfigError | None) -> Iterator[Violation]:
    """The ledger proves that the saved weights are a final state."""
    if history.saved is None or proof is None:
        return
    where = f"{history.name}, round {history.saved.final}"
    if isinstance(proof, ConfigError):
        yield Violation("the ledger proves what is saved", f"{where}: {proof}")
    elif proof.state != history.saved.state:
        yield Violation("the ledger proves what is saved", f"{where}: another state")


def _lost_work(history: History, rows: Rows) -> Iterator[Violation]:
    """Announced work is in its final set, or in the saved state: pending with its payload, or given back."""
    if history.lost_feedback:
        text = f"{history.name} dropped its error feedback {history.lost_feedback} times"
        yield Violation("nothing acknowledged is lost", text)
    saved = history.saved
    if saved is None:
        return
    pending = {one.payload for one in saved.pending}
    settled = max(saved.final, saved.settled)
    for entry in _contributions(history):
        assert isinstance(entry.body, Contribution)
        number, payload = entry.body.round, entry.body.payload
        where = f"{history.name}, round {number}"
        if number > settled and payload not in pending:
            yield Violation("nothing acknowledged is lost", f"{where}: its saved state does not know it")
        elif number > settled and payload not in history.whole:
            yield Violation("nothing acknowledged is lost", f"{where}: its payload is not whole")
    for past in saved.past:
        row = rows.get(past.sent.round)
        # Rows that count left the error feedback. In a reduced round an author may count with none of its rows.
        if past.rows and row and row.final and history.peer not in row.contributors:
            text = f"{history.name}, round {past.sent.round}: neither the final set nor the error feedback has it"
            yield Violation("nothing acknowledged is lost", text)


def _feeds(histories: Sequence[History], peers: dict[PeerId, str]) -> Iterator[Violation]:
    """Each author has one feed, itself has all of it, and contributed to no round twice."""
    ids: dict[tuple[PeerId, int], set[Digest]] = defaultdict(set)
    for entry in chain.from_iterable(history.entries for history in histories):
        ids[entry.author, entry.seq].add(entry.id)
    for author, seq in sorted(at for at, found in ids.items() if len(found) > 1):
        yield Violation("one feed an author", f"{peers.get(author, short(author))} has two entries {seq}")
    for history in histories:
        own = {entry.seq for entry in _own_entries(history)}
        lost = sorted(seq for author, seq in ids if author == history.peer and seq not in own)
        if lost:
            yield Violation(
                "what was given out is durable", f"{history.name} lacks {len(lost)} of its own entries"
            )
        counts = Counter(entry.body.round for entry in _contributions(history))
        for number in sorted(number for number, count in counts.items() if count > 1):
            yield Violation("one contribution a round", f"{history.name} made two to round {number}")


def _accused(histories: Sequence[History], peers: dict[PeerId, str]) -> Iterator[Violation]:
    """No correct node is banned, or held for one that signed two histories."""
    for history in histories:
        for peer in sorted(history.forked & peers.keys()):
            yield Violation("no correct node is accused", f"{history.name} has a proof against {peers[peer]}")
        for line in history.banned:
            for peer in peers:
                if peer in line:
                    yield Violation("no correct node is banned", f"{history.name}: {line}")


def _own_entries(history: History) -> list[Entry]:
    return [entry for entry in history.entries if entry.author == history.peer]


def _contributions(history: History) -> list[Entry]:
    return [entry for entry in _own_entries(history) if isinstance(entry.body, Contribution)]
