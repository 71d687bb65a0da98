"""The voter's part of finality: promises, votes, and the fold that a vote needs first. Pure."""

from dataclasses import replace

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.ballots import owner_of
from atoll.node.daemon.consensus.vote_rule import is_narrow, may_get_votes, share_of_ours
from atoll.protocols.ids import Digest
from atoll.protocols.ledger.records import Ballot, Prepare, Promise, Proposal, Vote

Out = tuple[finality_types.FinalityState, list[finality_types.Action]]


def promise(state: finality_types.FinalityState) -> Out:
    """Promise the highest ballot that its owner prepared: from then on this node votes in no lower one."""
    book = state.book
    prepared = [ballot for ballot in book.prepares if counts(state, ballot)]
    if not prepared or not may_append(state):
        return state, []
    ballot, bound = max(prepared), book.promised(state.me)
    if (state.me, ballot) in book.promises or (bound is not None and bound >= ballot):
        return state, []
    vote = book.highest_vote(state.me)
    return append(state, Promise(state.deciding, ballot, () if vote is None else (vote[0],)))


def vote(state: finality_types.FinalityState) -> Out:
    """Vote for the proposal of the highest ballot, once its fold gave the same state here."""
    found = _to_vote_for(state)
    if found is None:
        return state, []
    entry, proposal = found
    state, ready, actions = is_folded_here(state, proposal.contributions)
    if not ready:
        return state, actions
    ours = state.checked[proposal.contributions]
    if ours == proposal.state:
        return append(state, Vote(proposal.round, proposal.ballot, entry))
    # Another state means that one of the two folds is wrong. A vote would make it final without anybody knowing
    # which.
    if entry in state.reported:
        return state, []
    report = finality_types.ReportDivergence(proposal.round, entry, proposal.ballot.proposer, ours, proposal.state)
    return replace(state, reported=state.reported | {entry}), [report]


def report_narrow(state: finality_types.FinalityState) -> Out:
    """Report proposals of narrow sets, once each."""
    proposals = state.book.proposals.items()
    fresh = [(name, p) for name, p in proposals if name not in state.reported and counts(state, p.ballot)]
    narrow = [(name, p) for name, p in fresh if is_narrow(state, p.contributions)]
    actions: list[finality_types.Action] = []
    for name, proposal in narrow:
        named, ours = share_of_ours(state, proposal.contributions)
        actions.append(
            finality_types.ReportNarrow(proposal.round, name, proposal.ballot.proposer, named=named, ours=ours)
        )
    if not narrow:
        return state, []
    return replace(state, reported=state.reported.union(name for name, _ in narrow)), actions


def counts(state: finality_types.FinalityState, ballot: Ballot) -> bool:
    """Whether the ballot belongs to its proposer, and is not ahead of all that were due."""
    return ballot.attempt <= state.attempt and owner_of(state.voters, ballot.attempt) == ballot.proposer


def is_folded_here(
    state: finality_types.FinalityState, names: tuple[Digest, ...]
) -> tuple[finality_types.FinalityState, bool, list[finality_types.Action]]:
    """Whether the state of this set is known here; if not, the actions that fetch what is missing or check it."""
    if names in state.checked:
        return state, True, []
    book = state.book
    known = [(entry, *book.contributions[entry]) for entry in names if entry in book.contributions]
    if len({author for _, author, _ in known}) != len(known):  # two of one author: no lawful set
        return state, False, []
    entries = book.unknown(names)
    payloads = tuple(entry for entry, _, _ in known if entry not in state.held)
    if entries or payloads:
        state, actions = fetch_missing(state, entries, payloads)
        return state, False, actions
    # A check folds onto Θ_final, which must be that of the round before; one check of a set at a time.
    if names in state.checking or state.applied != state.last_final:
        return state, False, []
    return (
        replace(state, checking=state.checking | {names}),
        False,
        [finality_types.CheckRound(state.deciding, names)],
    )


def fetch_missing(
    state: finality_types.FinalityState, entries: tuple[Digest, ...], payloads: tuple[Digest, ...]
) -> Out:
    """Ask for entries and payloads, unless the same ones were asked for last."""
    if (entries, payloads) == state.missing:
        return state, []
    return replace(state, missing=(entries, payloads)), [
        finality_types.FetchMissing(state.deciding, entries, payloads)
    ]


def append(state: finality_types.FinalityState, body: Proposal | Vote | Prepare | Promise) -> Out:
    """Append an entry to our feed; nothing else is appended before its echo."""
    return replace(state, appending=body), [finality_types.Append(body)]


def may_append(state: finality_types.FinalityState) -> bool:
    """Whether this node is a voter with nothing on its way to the feed."""
    # The rules for the next entry look at the feed: while one entry is on its way, they would not see it.
    return state.appending is None and state.me in state.voters


def _to_vote_for(state: finality_types.FinalityState) -> tuple[Digest, Proposal] | None:
    """The proposal of the highest ballot among those that this node may vote for, with its entry id."""
    book = state.book
    if not may_append(state):
        return None
    bound = book.promised(state.me)
    free = [
        one for at, one in book.first_proposals().items() if (bound is None or at >= bound) and counts(state, at)
    ]
    free = [(name, p) for name, p in free if (state.me, p.ballot) not in book.votes]
    lawful = [(name, p) for name, p in free if not book.is_void(p) and not _is_refuted(state, p)]
    broad = [(name, p) for name, p in lawful if may_get_votes(state, p.ballot, p.contributions)]
    return max(broad, default=None, key=lambda item: item[1].ballot)


def _is_refuted(state: finality_types.FinalityState, proposal: Proposal) -> bool:
    """Whether the first ballot proposes a set with a Reduction that is proven wrong."""
    # Later ballots may be bound to such a set, because a quorum may have voted for it before the proof came: they
    # must be able to end.
    return proposal.ballot.attempt == 0 and not state.refuted.isdisjoint(proposal.contributions)
