"""Members whose identities were chosen for the slices of a small arena, and that reduce nothing.

Real: who reduces what (`ReductionLedger`) and the records. Stood in for: the vote, which names all that there is.
"""

from atoll.node.daemon.reduction.ledger_view import ReductionLedger
from atoll.protocols.identity import Identity
from atoll.protocols.ids import Digest, PeerId, Round, RunId, digest, peer_bytes
from atoll.protocols.ledger.records import (
    FEED_VERSION,
    Body,
    Entry,
    PlannedContribution,
    Reduction,
    SlicedContribution,
)
from atoll.protocols.ledger.reduction import ReductionRules, cover
from atoll.protocols.run.slices import ReduceSpec

RUN = RunId(digest(b"bench reducers: a gang"))
NOTHING = Digest(bytes(32))


def ground(chunks: int, tries: int) -> list[PeerId]:
    """Identities of a gang: for each slice the one, of so many, that comes before nearly all others there."""
    made = [Identity(digest(f"gang {number}".encode())).peer_id for number in range(tries)]
    found: list[PeerId] = []
    for number in range(chunks):
        words = b"atoll/reducer/1\0", RUN, number.to_bytes(4, "little")
        found.append(max((p for p in made if p not in found), key=lambda peer: digest(*words, peer_bytes(peer))))
    return found


class Gang:
    """A run in which a gang reduces nothing.

    `proposes`: rounds whose set is the gang's, without a Reduction. `knowing`: how many members know the reducers
    of a round when they contribute; None: all.
    """

    def __init__(
        self, members: int, chunks: int, tries: int, proposes: range = range(0), knowing: int | None = None
    ) -> None:
        self.gang, self.proposes, self.knowing = ground(chunks, tries), proposes, knowing
        honest = [Identity(digest(f"honest {n}".encode())).peer_id for n in range(members - len(self.gang))]
        self.peers = [*self.gang, *honest]
        self.ledger = ReductionLedger(honest[0], ReductionRules(RUN, chunks, 64, 128, 64), ReduceSpec())
        self.mute: list[int] = []
        """Slices of each round that the gang was to reduce, from the first reduced round on."""
        self._seq = 0

    @property
    def share(self) -> float:
        """Share of the slices of all reduced rounds that nobody reduced."""
        return sum(self.mute) / len(self.mute) / self.ledger.rules.chunks

    def play_round(self, number: int) -> None:
        """One round: contributions, the Reductions of the honest, the final set."""
        plan = self.ledger.plan(number)
        work = (Round(number), NOTHING, NOTHING, 1, 1, 64, 1.0, NOTHING)
        count = len(self.peers)
        unaware = count - (self.knowing or count) if plan.reducers else count
        kinds = [SlicedContribution] * unaware + [PlannedContribution] * (count - unaware)
        names = [self._add(peer, kind(*work)) for peer, kind in zip(self.peers, kinds, strict=True)]
        covered, more, members = cover(self.ledger.offers(number), plan) if plan.reducers else (b"", (), NOTHING)
        for peer, span in zip(plan.reducers, plan.spans, strict=False):
            if peer not in self.gang and number not in self.proposes:
                words = (span, covered, more, members, NOTHING, NOTHING, NOTHING, b"")
                names.append(self._add(peer, Reduction(Round(number), *words)))
        if plan.reducers:
            self.mute.append(sum(peer in self.gang for peer in plan.reducers))
        self.ledger.decide(number, sorted(names))

    def _add(self, author: PeerId, body: Body) -> Digest:
        self._seq += 1
        entry = Entry(FEED_VERSION, RUN, author, self._seq, b"", body, b"")  # nothing here looks at a signature
        self.ledger.add(entry)
        return entry.id
