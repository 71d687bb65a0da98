"""Tells the budget of newcomers (p2p/ledger/newcomers.py) about authors; forgets those that had to go."""

from collections.abc import Iterable
from dataclasses import dataclass

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.node.daemon.core.runtime import Machines
from atoll.node.daemon.rounds import types as round_types
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.records import Entry, Proposal, set_digest


@dataclass(slots=True, kw_only=True)
class NewcomerWatch:
    """The coordinator's side of the budget."""

    context: RunContext
    net: Network
    machines: Machines
    contributions: ContributionIndex
    seed: bytes = b""  # of the newest final set

    def begin(self) -> None:
        """Before the replay: whom the RunSpec names is no newcomer."""
        spec = self.context.spec
        self.net.accept((spec.owner, *spec.admission.members), by_work=False)

    def on_entry(self, entry: Entry) -> None:
        """A voter's proposal keeps what it names; what is not here comes past the budget."""
        body, finality = entry.body, self.machines.finality
        if isinstance(body, Proposal) and body.round == finality.deciding and entry.author in finality.voters:
            self.net.keep(self.contributions.authors(body.contributions))
            lacking = [entry for entry in body.contributions if entry not in self.contributions]
            self.net.require(lacking, entry.author)

    def on_final(self, names: Iterable[Digest]) -> None:
        """A round is final with this set."""
        self.net.accept(self.contributions.authors(names))
        self.seed = set_digest([*names])

    def step(self) -> None:
        """Tell the rounds whose work comes first where one has more than its set may name."""
        finality, known = self.machines.finality, self.machines.round.set_rules
        seniority, order = finality.seniority, finality.newcomer_order(self.seed)
        if (seniority, order) != (known.seniority, known.order):
            self.machines.feed_round(round_types.SenioritySeen(seniority, order, self.context.now()))

    def on_held(self, payload: Digest) -> str:
        """A payload was verified: the work of one author, whoever names it too. Returns who brought that one."""
        author = self.contributions.first_author(payload)
        return "" if author is None else self.net.vouch(author)

    def on_pruned(self, author: PeerId) -> None:
        """The feed of an author that showed no work is gone; if it comes back, all of it comes again."""
        self.contributions.forget_author(author)
        self.machines.feed_round(round_types.AuthorPruned(author, self.context.now()))
        self.machines.feed_finality(finality_types.AuthorPruned(author))
