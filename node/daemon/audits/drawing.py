"""Which audits of a final set fall to a member, as requests to a worker.

All of a request follows from the set, the member and a seed, so an evaluator makes the same audit as the member.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.node.daemon.audits.newcomer_weights import Weigh, claimed_weights
from atoll.node.daemon.coordinator.contribution_sets import ContributionIndex
from atoll.node.daemon.core.interfaces import BlobSource
from atoll.protocols.audits.standing import FULL, audited_by
from atoll.protocols.ids import Digest, PeerId, Round
from atoll.protocols.ledger.audit_claims import audit_key, audit_seed
from atoll.protocols.local.contribution_forms import member_of
from atoll.protocols.local.worker_messages import AuditRequest, Member
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.moments import is_orthogonalized
from atoll.protocols.run.run_spec import RunSpec


def is_repeatable(spec: RunSpec) -> bool:
    """Whether a node that does not train measures in an audit what a trainer does.

    A trainer divides by the gradients' sizes, as its own Adam has them. Without them the same windows showed 1.7
    deviations instead of 2.2, and single verdicts differed by up to 2.4. Muon has no sizes, so nobody divides.
    """
    matrices = (
        place.name
        for place in arena_of(spec.model).placements
        if len(place.shape) == 2 and place.name.startswith("model.layers.")
    )
    return all(is_orthogonalized(spec.inner.optimizer, name) for name in matrices)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditDraw:
    """Draws audits of the contributions that are known here."""

    each: int
    """Contributions of a round that each of its authors audits."""
    contributions: ContributionIndex
    blobs: BlobSource
    weigh: Weigh = claimed_weights
    """Returns what contributions to a final round weigh in its fold."""

    def is_whole(self, names: tuple[Digest, ...]) -> bool:
        """Return whether all payloads of a set are here: another node with all of them draws the same."""
        return all(map(self.contributions.is_held, names))

    def draw(
        self,
        number: Round,
        names: tuple[Digest, ...],
        member: PeerId,
        seed: Digest,
        before: Callable[[Digest], Round] = lambda entry: Round(0),
    ) -> dict[bytes, AuditRequest]:
        """The audits that fall to a member of a set, by key; none if it did not contribute, or if all is missing.

        `before`: rounds below it were final here when a contribution came. By default no payload was sent before.
        """
        everybody = self.contributions.find(names)
        found = {entry: (author, record) for entry, author, record in everybody}
        own = next((entry for entry, (author, _) in found.items() if author == member), None)
        held = [entry for entry in found if self.contributions.is_held(entry)]
        if own is None or len(held) < 2:
            return {}

        def named(entry: Digest) -> Member:
            author, record = found[entry]
            return member_of(entry, author, record.weight, record, self.blobs.blob_path(record.payload))

        requests, weights = {}, self.weigh(number, everybody)
        for drawn in audited_by(found, self.each).get(own, ()):
            chance = audit_seed(seed, drawn)
            others = _by_weight({entry: weights[entry] for entry in held if entry != drawn}, chance)
            if drawn in held:
                requests[audit_key(seed, drawn)] = AuditRequest(
                    round=number,
                    tokens=found[drawn][1].tokens,
                    seed=chance,
                    audited=named(drawn),
                    others=tuple(replace(named(entry), weight=weight) for entry, weight in others.items()),
                    sent=tuple(map(named, held)),
                    before=before(drawn),
                )
        return requests


def _by_weight(weights: Mapping[Digest, int], chance: int) -> dict[Digest, int]:
    """Contributions with weights, the heavier ones likely first; `chance` says in which order.

    Identities cost nothing: with one say each, made-up ones that train on a member's windows would hide its work.
    """
    rng = random.Random(chance)
    turns = {entry: rng.expovariate(weights[entry]) for entry in sorted(weights) if weights[entry]}
    return {entry: min(FULL, weights[entry]) for entry in sorted(turns, key=turns.__getitem__)}
