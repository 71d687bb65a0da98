"""Why a summary is believed by who took part in none of its rounds: a chain of links from the run's owner. Pure.

The owner decides round 0, as everybody knows from the RunSpec. From voters that are known a link leads to any
later summary for which a quorum of these same voters voted, as light clients of Tendermint skip headers. An honest
voter votes only for a summary that it found itself, and a quorum has honest ones where fewer than a third of those
voters lie. The summary names the voters of the round after it, and these are known from then on.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from atoll.node.daemon.certificates.full_summary import FullSummary, decode_full
from atoll.node.daemon.certificates.summary import check_sizes
from atoll.p2p.exchange.summaries import MAX_LINKS
from atoll.p2p.ledger.history import Link, StoredLink
from atoll.protocols.errors import DecodeError
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import quorum
from atoll.protocols.ledger.entry_rules import is_lawful
from atoll.protocols.ledger.records import Entry, SummaryProposal, Vote, decode_entry, encode_entry
from atoll.protocols.run.run_spec import RunSpec


class Trusted(NamedTuple):
    """Voters that are known, and the first round that they decide."""

    voters: tuple[PeerId, ...]
    first: int


class Certified(NamedTuple):
    """The summary that a link proves."""

    last: int
    """Its newest round."""
    name: Digest
    """Its blob id."""


def owner_of(spec: RunSpec) -> Trusted:
    """Whom everybody knows: the owner decides round 0."""
    return Trusted((spec.owner,), 0)


def after(full: FullSummary) -> Trusted:
    """Whom a summary makes known."""
    return Trusted(full.summary.voters, full.summary.round + 1)


def check_link(spec: RunSpec, link: Link, trusted: Trusted) -> Certified:
    """The summary that a link proves to who knows these voters. Raises DecodeError, SignatureFault."""
    entry = decode_entry(link.proposal, spec.id)
    body = entry.body
    if not isinstance(body, SummaryProposal) or not is_lawful(spec, entry) or body.round <= trusted.first:
        raise DecodeError("a link that names no later summary")
    given: set[PeerId] = set()
    for vote in (decode_entry(data, spec.id) for data in link.votes):
        if isinstance(vote.body, Vote) and _is_for(vote.body, entry.id, body):
            given.add(vote.author)
    if len(given.intersection(trusted.voters)) < quorum(len(trusted.voters)):
        raise DecodeError("a link without votes of a quorum of the voters that are known")
    return Certified(body.round - 1, body.summary)


def check_summary(spec: RunSpec, certified: Certified, data: bytes) -> FullSummary:
    """The summary in bytes that have the certified blob id. Raises DecodeError, LocalFault."""
    full = decode_full(data)
    check_sizes(spec, full.summary)
    if full.summary.round != certified.last:
        raise DecodeError("a summary of other rounds than its link says")
    return full


def extended(
    spec: RunSpec, chain: Sequence[StoredLink], proposal: Entry, votes: Iterable[Entry], data: bytes
) -> tuple[StoredLink, ...] | None:
    """The shortest chain to this summary over links of `chain`; None if too few known voters voted for it."""
    body = proposal.body
    assert isinstance(body, SummaryProposal)
    found = {
        entry.author: entry
        for entry in votes
        if isinstance(entry.body, Vote) and _is_for(entry.body, proposal.id, body)
    }
    known = [owner_of(spec), *(after(decode_full(link.summary)) for link in chain)]
    # The earliest voters of whom enough are still there: what lies between is needed no more.
    for at, trusted in enumerate(known[:MAX_LINKS]):
        signed = [peer for peer in trusted.voters if peer in found]
        if len(signed) >= quorum(len(trusted.voters)):
            proof = tuple(encode_entry(found[peer]) for peer in signed[: quorum(len(trusted.voters))])
            link = Link(encode_entry(proposal), proof)
            return (*chain[:at], StoredLink(link, body.summary, data))
    return None


def _is_for(vote: Vote, name: Digest, proposal: SummaryProposal) -> bool:
    return (vote.proposal, vote.round, vote.ballot) == (name, proposal.round, proposal.ballot)
