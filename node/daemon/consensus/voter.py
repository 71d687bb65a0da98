"""The voter's part of finality: promises, votes, which sets get them, and the fold that a vote needs first. Pure.

The authors of a final set decide the next round, so a set with few of the contributions would give the run to few.
A set gets a vote if it names enough of what this node has, or if the node is bound to it. Rules in words:
docs/finality.md.
"""

from collections.abc import Collection

from msgspec.structs import replace

from atoll.node.daemon.consensus.excision import corrections, is_due
from atoll.node.daemon.consensus.exclusion import outvoted
from atoll.node.daemon.consensus.inherited import inherited
from atoll.node.daemon.consensus.types import (
    Action,
    Append,
    CheckRound,
    FetchMissing,
    FinalityState,
    ReportDivergence,
    ReportNarrow,
    ReportOtherSummary,
)
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import bound_proposals, owner_of
from atoll.protocols.ledger.choices import Choice, choice_of
from atoll.protocols.ledger.records import (
    MAX_SET,
    Ballot,
    Epoch,
    Follow,
    Prepare,
    Promise,
    Proposal,
    SummaryProposal,
    Vote,
)

Out = tuple[FinalityState, list[Action]]
DOUBTING_ATTEMPTS = 8
"""Two reducers that are silent to a third of the voters each stop as many free ballots, whoever owns them.

At a third of liars all these ballots are theirs in one round of 6,561: then what they hid gets votes.
"""


def promise(state: FinalityState) -> Out:
    """Promise the highest ballot that its owner prepared: from then on this node votes in no lower one."""
    book = state.book
    if not book.prepares:
        return state, []  # nearly always, and this is asked at every event
    prepared = [ballot for ballot in book.prepares if counts(state, ballot)]
    if not prepared or not may_append(state, to_promise=True):
        return state, []
    ballot, bound = max(prepared), book.promised(state.me)
    if book.promised_by((state.me,), ballot) or (bound is not None and bound >= ballot):
        return state, []
    vote = book.highest_vote(state.me)
    return append(state, Promise(state.deciding, ballot, () if vote is None else (vote[0],)))


def vote(state: FinalityState) -> Out:
    """Vote for the proposal of the highest ballot, once its fold gave the same state here."""
    found = _to_vote_for(state)
    if found is None:
        return state, []
    entry, proposal = found
    state, ready, actions = is_folded_here(state, choice_of(proposal), proposal.ballot.proposer)
    if not ready:
        return state, actions
    ours = state.checked[choice_of(proposal).folded]
    if ours == proposal.state:
        if isinstance(proposal, SummaryProposal) and proposal.summary != state.own_summary:
            return _report_summary(state, entry, proposal)
        return append(state, Vote(proposal.round, proposal.ballot, entry))
    # Another state means that one of the two folds is wrong. A vote would make it final without anybody knowing
    # which.
    if entry in state.reported:
        return state, []
    report = ReportDivergence(proposal.round, entry, proposal.ballot.proposer, ours, proposal.state)
    return replace(state, reported=state.reported | {entry}), [report]


def _report_summary(state: FinalityState, entry: Digest, proposal: SummaryProposal) -> Out:
    """Report a summary that is not ours, once: certified, it would mislead every newcomer."""
    ours = state.own_summary
    if ours is None or entry in state.reported:
        return state, []  # the own one may be on its way
    report = ReportOtherSummary(proposal.round, entry, proposal.ballot.proposer, ours, proposal.summary)
    return replace(state, reported=state.reported | {entry}), [report]


def report_narrow(state: FinalityState) -> Out:
    """Report proposals of sets that lack half or more of what we have, once each."""
    proposals = state.book.proposals.items()
    if state.stable_since is None or state.reported.issuperset(state.book.proposals):
        return state, []  # before that none is narrow
    actions: list[Action] = []
    # What names all of our own set is not narrow. Mostly it is that very set, and this is asked at every event.
    view = {*state.views.get(state.deciding, ())}
    fresh = [(name, p) for name, p in proposals if not (view and view.issubset(p.contributions))]
    fresh = [(name, p) for name, p in fresh if name not in state.reported and counts(state, p.ballot)]
    counted = _counted_of_ours(state) if fresh else set[Digest]()
    for name, proposal in fresh:
        named, ours = len(counted.intersection(proposal.contributions)), len(counted)
        if 2 * named <= ours > 0:
            actions.append(ReportNarrow(proposal.round, name, proposal.ballot.proposer, named=named, ours=ours))
            state = replace(state, reported=state.reported | {name})
    return state, actions


def counts(state: FinalityState, ballot: Ballot) -> bool:
    """Whether the ballot belongs to its proposer, and is not ahead of all that were due."""
    return ballot.attempt <= state.attempt and owner_of(state.voters, ballot.attempt) == ballot.proposer


def is_folded_here(
    state: FinalityState, choice: Choice, proposer: PeerId
) -> tuple[FinalityState, bool, list[Action]]:
    """Whether the state of a choice is known here; if not, the actions that fetch what it lacks or check it."""
    choice = choice.folded
    if choice in state.checked:
        return state, True, []
    book, names = state.book, choice.names
    known = [(entry, *book.contributions[entry]) for entry in names if entry in book.contributions]
    if len({author for _, author, _ in known}) != len(known):  # two of one author: no lawful set
        return state, False, []
    entries = book.unknown(names)
    payloads = tuple(entry for entry, _, _ in known if entry not in state.held)
    if entries or payloads:
        state, actions = fetch_missing(state, FetchMissing(state.deciding, entries, payloads, proposer))
        return state, False, actions
    # A check folds onto Θ_final, which must be that of the round before; one check of a set at a time.
    if choice in state.checking or state.applied != state.last_final:
        return state, False, []
    changed = corrections(state, choice.excised) if choice.excised else ()
    check = CheckRound(state.deciding, names, choice.excised, changed)
    return replace(state, checking=state.checking | {choice}), False, [check]


def fetch_missing(state: FinalityState, asked: FetchMissing) -> Out:
    """Ask for entries and payloads, unless the same ones were asked for last for this proposer."""
    if state.missing.get(asked.proposer) == asked:
        return state, []
    return replace(state, missing={**state.missing, asked.proposer: asked}), [asked]


def append(state: FinalityState, body: Proposal | Vote | Prepare | Promise | Epoch | Follow) -> Out:
    """Append an entry to our feed; nothing else is appended before its echo."""
    return replace(state, appending=body), [Append(body)]


def may_append(state: FinalityState, *, to_promise: bool = False) -> bool:
    """Whether this node is a voter with nothing on its way to the feed."""
    # The rules for the next entry look at the feed: while one entry is on its way, they would not see it.
    if state.appending is not None or state.me not in state.voters:
        return False
    # Who signed another epoch votes in it only, also while it waits for others; who left does not vote. It still
    # promises: else the others see no ballot in which most take part, and so not who keeps back its votes.
    at, book = (state.epoch, state.deciding), state.epochs
    is_here = book.choice(state.me) == state.epoch or (to_promise and book.waits_at(state.me, at))
    return is_here and not book.has_left(state.me, state.deciding, state.epoch)


def _to_vote_for(state: FinalityState) -> tuple[Digest, Proposal] | None:
    """The proposal of the highest ballot among those that this node may vote for, with its entry id."""
    book = state.book
    if not book.proposals or not may_append(state):
        return None
    bound = book.promised(state.me)
    free = [
        one for at, one in book.first_proposals().items() if (bound is None or at >= bound) and counts(state, at)
    ]
    free = [(name, p) for name, p in free if not book.voted_in((state.me,), p.ballot)]
    lawful = [(name, p) for name, p in free if not book.is_void(p) and not _is_refuted(state, p)]
    broad = [(name, p) for name, p in lawful if may_get_votes(state, p.ballot, choice_of(p))]
    return max(broad, default=None, key=lambda item: item[1].ballot)


def _is_refuted(state: FinalityState, proposal: Proposal) -> bool:
    """Whether one of the first ballots proposes, unbound, a set with a Reduction that is not believed."""
    # Bound ones must be able to end. So must a round in which each voter got no answer about another Reduction.
    is_proven, attempts = not state.proven.isdisjoint(proposal.contributions), len(state.voters)
    attempts = attempts if is_proven else min(attempts, DOUBTING_ATTEMPTS)
    early = proposal.ballot.attempt < attempts and not state.refuted.isdisjoint(proposal.contributions)
    return early and not bound_proposals(state.book, state.voters, proposal.ballot, state.equivocators)


# --- which sets get votes -------------------------------------------------------------------------


def may_get_votes(state: FinalityState, ballot: Ballot, choice: Choice) -> bool:
    """Whether this node would vote for the choice in this ballot, if it gives the same state here."""
    names = choice.names
    if state.book.is_over(names):
        return False
    if ballot.attempt == 0:
        return is_broad(state, names) and (_is_just(state, choice) or choice == inherited(state))
    # Voters count the promises in their own ledger. If they took the proposer's word for what a quorum may have
    # voted for, one liar could hide those votes and have a second set made final.
    bound = bound_proposals(state.book, state.voters, ballot, state.equivocators)
    if not bound:
        return bound is not None and is_broad(state, names) and _is_just(state, choice)
    # A set that all are bound to may be narrow, and is voted for all the same: another one could contradict it.
    # While more than one set may have had a quorum, none is safe: more promises will rule all but one out.
    proposal = state.book.proposals.get(bound[0]) if len(bound) == 1 else None
    repeats = proposal is not None and choice_of(proposal) == choice
    return repeats and (_all_answered(state, ballot) or is_broad(state, names))


def _is_just(state: FinalityState, choice: Choice) -> bool:
    """Whether it has no work of an excluded author, and this node knows a reason for all that it removes."""
    if names_excluded(state, choice.names) or (choice.excised and not is_due(state, choice.excised)):
        return False
    return not choice.excluded or {*choice.excluded} <= {*outvoted(state, choice.names)}


def names_excluded(state: FinalityState, names: Collection[Digest]) -> bool:
    """Whether the set has work of an author that is excluded. A set of such work alone has none."""
    # Such a set has been voted for, or nobody else worked in the round: it could never become final without.
    return len(_counted(state, names)) < len(names)


def _counted(state: FinalityState, names: Collection[Digest]) -> set[Digest]:
    """The part of a set that counts: without the work of excluded authors, unless there is no other."""
    barred, book = state.epochs.excluded_from(state.deciding), state.book
    # Mostly they write nothing any more, and this is asked at every event.
    if book.contributors.isdisjoint(barred) and not (barred and book.reductions):
        return {*names}
    left = {name for name in names if book.author_of(name) not in barred}
    return left if book.authors_of(left) else {*names}


def _all_answered(state: FinalityState, ballot: Ballot) -> bool:
    """Whether all voters have promised, or had half a patience to do so."""
    # One more promise may show that no quorum voted for a narrow set. At exactly a third of liars one silent
    # honest voter is enough to make it look possible: therefore the wait.
    asked = [peer for peer in state.voters if peer not in state.equivocators]
    all_promised = len(state.book.promised_by(asked, ballot)) == len(asked)
    return all_promised or state.now - state.since >= state.patience_s / 2


def is_stuck(state: FinalityState) -> bool:
    """Whether nothing happened for a patience to a round whose set will hardly grow any more."""
    stable = state.stable_since
    return stable is not None and state.now - max(state.since, stable) >= state.patience_s


def is_broad(state: FinalityState, names: Collection[Digest]) -> bool:
    """Whether the set names all that we have; or more than half of it, once that will hardly grow any more."""
    # More than half: of n contributions at most n/3 are liars', so of m > n/2 named ones they have less than 2m/3,
    # no quorum. The set after it needs an honest vote again, so sets cannot shrink step by step. The share never
    # gets smaller with time or attempts: liars could wait for that.
    named, ours = share_of_ours(state, names)
    is_whole = ours > 0 and _own_set(state).issubset(names)
    return is_whole or (state.stable_since is not None and 2 * named > ours)


def share_of_ours(state: FinalityState, names: Collection[Digest]) -> tuple[int, int]:
    """How many contributions of our own set of the round a set names, and how many that has; (0, 0) too early."""
    counted = _counted_of_ours(state)
    return len(counted.intersection(names)), len(counted)


def _counted_of_ours(state: FinalityState) -> set[Digest]:
    """The contributions of our own set by proven authors. Any number of others may be a flood.

    Of a set that names as many as it may, those of authors that are in the newest final sets, or decide now.
    """
    ours, book = _own_set(state), state.book
    authors = book.authors_of(ours)
    proven = state.tally.proven(authors)
    # Of newcomers each node may have drawn others.
    proven = proven - state.tally.newcomers_of(proven, state.voters) or proven
    if len(ours) >= MAX_SET:
        # Of a flood each node holds another part, so full sets may share few of its authors.
        known = state.electorate(state.deciding)
        proven = proven.intersection(known.recent.union(known.voters)) or proven
    return ours if proven >= authors else {entry for entry in ours if book.author_of(entry) in proven}


def _own_set(state: FinalityState) -> set[Digest]:
    """Our own set of the round, without excluded work and that of other chains; empty too early."""
    # Our own set, not the ledger: work that no peer serves, or of members in name only, is in no set. An idle node
    # may never close the round, and counts what it holds after its patience.
    view, known = state.views.get(state.deciding), state.book.contributions
    rested = state.idle and state.stable_since is not None and state.now - state.stable_since >= state.patience_s
    names = view or (state.held if rested else frozenset[Digest]()) - state.book.orphans
    found = known.keys() & names
    return _counted(state, found - state.apart or found)
