"""Finality as a pure state machine: the members agree once per round on its exact set of contributions.

Single-decree Paxos per round (Lamport, "Paxos Made Simple", 2001), one round at a time, with ledger
entries for messages: a promise or a vote is durable before anybody can see it, and whoever restarts
replays its own feed first (`Live` ends the replay). Rules in words: docs/finality.md.

1. The owner of attempt 0 proposes its view of the set.      Proposal
2. Members that fold it to the same state vote for it, if    Vote; ⌈2n/3⌉ of them make it final
   it names more than half of what they have (breadth.py).
3. When nothing becomes final, the next owner asks first.    Prepare, Promise, then 1 with a higher ballot

Who was promised by a quorum proposes what a quorum may have voted for before (`bound_to`), and voters count that
themselves: two different sets can never both become final.
"""

from collections import Counter
from dataclasses import replace

from atoll.node.daemon.consensus.ballots import Book, bound_to, decided, order, owner_of, quorum, record
from atoll.node.daemon.consensus.types import (
    Action,
    Append,
    CheckDone,
    CheckRound,
    Doubted,
    EntryPayloadHeld,
    EntrySeen,
    Event,
    FetchMissing,
    FinalApplied,
    FinalityState,
    FinalityTick,
    FinalizeRound,
    Idle,
    Live,
    NotAppended,
    ReportDivergence,
    ReportEquivocation,
    ReportNarrow,
    RoundClosed,
)
from atoll.node.daemon.consensus.vote_rule import is_narrow, may_get_votes, share_of_ours
from atoll.protocols.ids import Digest, PeerId, Round, RunId
from atoll.protocols.ledger.records import Ballot, Leave, Prepare, Promise, Proposal, Vote, set_digest

Out = tuple[FinalityState, list[Action]]


def begin(run: RunId, me: PeerId, rounds: int, owner: PeerId) -> FinalityState:
    """Before the first entry: round 0 is for the run's owner to decide."""
    return FinalityState(run, me, rounds, -1, (owner,))


def step(state: FinalityState, event: Event) -> Out:
    """Next state, and what to do about it."""
    state, actions = _take(state, event)
    if isinstance(event, NotAppended):
        return state, actions
    state, finals = _decide(state)
    state, actions = _admit(state), actions + finals
    if state.live and state.last_final + 1 < state.rounds:
        for move in (_promise, _vote, _complain, _propose, _prepare):
            state, more = move(state)
            actions += more
    return state, actions


# --- events become facts ------------------------------------------------------------------------


def _take(state: FinalityState, event: Event) -> Out:
    match event:
        case EntrySeen():
            return _entry(state, event)
        case EntryPayloadHeld(entry):
            return replace(state, held=state.held | {entry}), []
        case RoundClosed(number, members):
            views = {**state.views, number: members}
            return _ripen(replace(state, views=views, closed=max(state.closed, number))), []
        case CheckDone(number, contributions, digest):
            if number != state.last_final + 1:
                return state, []
            checked = {**state.checked, contributions: digest}
            return replace(state, checked=checked, checking=state.checking - {contributions}), []
        case FinalApplied(number):
            return replace(state, applied=number, checking=frozenset()), []
        case Doubted(entry):
            return replace(state, doubted=state.doubted | {entry}), []
        case NotAppended():
            return replace(state, appending=None), []
        case Live():
            return replace(state, live=True), []
        case Idle(idle, now):
            return _ripen(replace(state, idle=idle, now=max(state.now, now))), []
        case FinalityTick(now):
            return _ripen(replace(state, now=max(state.now, now))), []


def _entry(state: FinalityState, event: EntrySeen) -> Out:
    body = event.body
    if event.author == state.me and body == state.appending:
        state = replace(state, appending=None)
    if isinstance(body, Leave) or not state.last_final < body.round < state.rounds:
        return state, []
    before = state.books.get(body.round, Book())
    book, fault = record(before, event.entry, event.author, body)
    state = replace(state, books={**state.books, body.round: book})
    if body.round == state.last_final + 1 and isinstance(body, Proposal):
        newest = body.ballot.attempt == state.top and _counts(state, body.ballot)
        if newest and body.ballot.proposer == event.author and body.ballot not in before.firsts():
            state = replace(state, since=state.now)
    if not fault:
        return state, []
    return state, [ReportEquivocation(body.round, event.author, event.entry, fault)]


def _admit(state: FinalityState) -> FinalityState:
    """Let later ballots count as soon as they are due: from then on older ones get no promise."""
    later = [b for b in state.book.prepares if b.attempt > state.top]
    later = [b for b in later if owner_of(state.acceptors, b.attempt) == b.proposer]
    due = [ballot.attempt for ballot in later if _is_due(state, ballot)]
    return replace(state, top=max(due), since=state.now) if due else state


def _is_due(state: FinalityState, ballot: Ballot) -> bool:
    """Had the owner of the attempt before this one half a turn at least, or did somebody honest find that it had?

    Whoever opened its ballots as it liked would cut off those of the others for ever. More than a third that
    answered are not all liars: so who comes late, or was cut off, need not wait again.
    """
    count, ahead = len(state.acceptors), ballot.attempt - state.top
    if ballot.proposer == state.me or 3 * len(state.book.who_answered(state.acceptors, ballot)) > count:
        return True
    turns = (ahead - 0.5) * (1 + state.top / count)
    return ahead <= count and state.now - state.since >= turns * state.patience_s


def _counts(state: FinalityState, ballot: Ballot) -> bool:
    """Is the ballot its owner's, and not ahead of all that were due?"""
    return ballot.attempt <= state.top and owner_of(state.acceptors, ballot.attempt) == ballot.proposer


def _ripen(state: FinalityState) -> FinalityState:
    """Remember since when this node does not expect the set of the next round to grow."""
    ripe = state.idle or state.closed > state.last_final + 1
    if not ripe:
        return replace(state, ripe_at=None)
    return state if state.ripe_at is not None else replace(state, ripe_at=state.now)


# --- deciding -----------------------------------------------------------------------------------


def _decide(state: FinalityState) -> Out:
    """Move over every round that the ledger proves final."""
    actions: list[Action] = []
    while state.last_final + 1 < state.rounds:
        book = state.book
        found = decided(book, state.acceptors)
        if found is None:
            break
        _, proposal = found
        unknown = book.unknown(proposal.contributions)
        if unknown:
            state, more = _missing(state, unknown, ())
            return state, actions + more
        actions.append(FinalizeRound(proposal.round, proposal.contributions, proposal.state))
        state = _next_round(state, book.authors_of(proposal.contributions))
    return state, actions


def _next_round(state: FinalityState, authors: set[PeerId]) -> FinalityState:
    number = state.last_final + 1
    books = {at: book for at, book in state.books.items() if at > number}
    done = replace(
        state,
        last_final=number,
        acceptors=order(state.run, number + 1, authors),
        books=books,
        held=state.held & {entry for book in books.values() for entry in book.contributions},
        views={at: view for at, view in state.views.items() if at > number},
        checked={},
        checking=frozenset(),
        missing=((), ()),
        told=frozenset(),
        top=0,
        since=state.now,
        ripe_at=None,
    )
    return _ripen(done)


def _promise(state: FinalityState) -> Out:
    """Promise the highest ballot that somebody prepared."""
    book = state.book
    asked = [b for b in book.prepares if _counts(state, b)]
    if not asked or not _may_append(state):
        return state, []
    ballot, bound = max(asked), book.promised(state.me)
    if (state.me, ballot) in book.promises or (bound is not None and bound >= ballot):
        return state, []
    vote = book.highest_vote(state.me)
    return _append(state, Promise(_round(state), ballot, () if vote is None else (vote[0],)))


def _vote(state: FinalityState) -> Out:
    """Vote for the proposal of the highest ballot, once its fold gave the same state here."""
    found = _to_vote_for(state)
    if found is None:
        return state, []
    entry, proposal = found
    state, ready, actions = _folded_here(state, proposal.contributions)
    if not ready:
        return state, actions
    ours = state.checked[proposal.contributions]
    if ours == proposal.state:
        return _append(state, Vote(proposal.round, proposal.ballot, entry))
    if entry in state.told:
        return state, []
    report = ReportDivergence(proposal.round, entry, proposal.ballot.proposer, ours, proposal.state)
    return replace(state, told=state.told | {entry}), [report]


def _to_vote_for(state: FinalityState) -> tuple[Digest, Proposal] | None:
    """The highest ballot's, of those that we may vote for."""
    book = state.book
    if not _may_append(state):
        return None
    bound = book.promised(state.me)
    free = [one for at, one in book.firsts().items() if (bound is None or at >= bound) and _counts(state, at)]
    free = [(name, p) for name, p in free if (state.me, p.ballot) not in book.votes]
    legal = [(name, p) for name, p in free if not book.is_void(p) and not _is_doubted(state, p)]
    broad = [(name, p) for name, p in legal if may_get_votes(state, p.ballot, p.contributions)]
    return max(broad, default=None, key=lambda item: item[1].ballot)


def _is_doubted(state: FinalityState, proposal: Proposal) -> bool:
    """Does it name a Reduction that is proven wrong? Later ballots may be bound to it, and must be able to end."""
    return proposal.ballot.attempt == 0 and not state.doubted.isdisjoint(proposal.contributions)


def _complain(state: FinalityState) -> Out:
    """Report narrow sets, once each."""
    fresh = [(n, p) for n, p in state.book.proposals.items() if n not in state.told and _counts(state, p.ballot)]
    narrow = [(name, proposal) for name, proposal in fresh if is_narrow(state, proposal.contributions)]
    if not narrow:
        return state, []
    return replace(state, told=state.told.union(name for name, _ in narrow)), [
        ReportNarrow(p.round, name, p.ballot.proposer, *share_of_ours(state, p.contributions))
        for name, p in narrow
    ]


def _propose(state: FinalityState) -> Out:
    """Propose in the highest ballot that is ours, if it is time and nothing was proposed in it."""
    ballot = _own_ballot(state)
    if ballot is None or not _may_append(state):
        return state, []
    value = _value(state, ballot)
    if value is None:
        return state, []
    state, ready, actions = _folded_here(state, value)
    if not ready:
        return state, actions
    return _append(state, Proposal(_round(state), ballot, value, state.checked[value]))


def _own_ballot(state: FinalityState) -> Ballot | None:
    book = state.book
    if state.top == 0 and owner_of(state.acceptors, 0) == state.me:
        ballot = Ballot(0, state.me)
    else:
        ours = [b for b in book.prepares if b.proposer == state.me and b.attempt == state.top]
        if not ours or owner_of(state.acceptors, ours[0].attempt) != state.me:
            return None
        ballot = ours[0]
    bound = book.promised(state.me)
    if ballot in book.firsts() or (bound is not None and bound > ballot):
        return None
    return ballot


def _value(state: FinalityState, ballot: Ballot) -> tuple[Digest, ...] | None:
    """What to propose in a ballot of ours; None while it is too early."""
    book, view = state.book, state.views.get(state.last_final + 1)
    if view and not state.doubted.isdisjoint(view):
        view = None  # it is being folded again
    if ballot.attempt == 0:
        return view if view and _is_time(state, view) else None
    bound = bound_to(book, state.acceptors, ballot)
    if not bound:
        return view or None if bound is not None else None
    if bound[0] not in book.proposals:
        return None  # not heard of yet
    names = book.proposals[bound[0]].contributions
    return names if may_get_votes(state, ballot, names) else None


def _is_time(state: FinalityState, view: tuple[Digest, ...]) -> bool:
    """Ballot 0: a quorum acknowledged our set, or it will hardly grow any more.

    A set with Reductions is never proposed early: there must be time to open them, and to tell of a wrong one.
    """
    name, acks = set_digest(list(view)), state.book.acks
    early = state.book.reductions.keys().isdisjoint(view)
    if early and sum(acks.get(peer) == name for peer in state.acceptors) >= quorum(len(state.acceptors)):
        return True
    if state.closed > state.last_final + 1:
        return True
    return state.idle and state.ripe_at is not None and state.now - state.ripe_at >= state.patience_s


def _prepare(state: FinalityState) -> Out:
    """Open the next ballot of ours when nothing became final for too long."""
    if state.ripe_at is None or not _may_append(state) or not state.views.get(state.last_final + 1):
        return state, []
    count = len(state.acceptors)
    attempt = next(
        a for a in range(state.top + 1, state.top + 1 + count) if owner_of(state.acceptors, a) == state.me
    )
    turns = (attempt - state.top) * (1 + state.top / count)
    if state.now - max(state.since, state.ripe_at) < turns * state.patience_s:
        return state, []
    state, able, actions = _could_propose(state)
    if not able:
        return state, actions
    return _append(state, Prepare(_round(state), Ballot(attempt, state.me)))


def _could_propose(state: FinalityState) -> tuple[FinalityState, bool, list[Action]]:
    """Would we have what a ballot of ours needs? Our own view we have; a set that others voted for perhaps not.

    As long as a quorum may promise without a vote for a set, it may bind nobody. Otherwise it must be folded here
    first: members that voted for it hold its payloads.
    """
    book, count = state.book, len(state.acceptors)
    votes = Counter((v.ballot, v.proposal) for (who, _), (_, v) in book.votes.items() if who in state.acceptors)
    for (_, name), here in sorted(votes.items(), reverse=True):
        if here <= count - quorum(count):
            continue
        if name not in book.proposals:
            return state, False, []
        if not book.is_void(book.proposals[name]):
            return _folded_here(state, book.proposals[name].contributions)
    return state, True, []


# --- common -------------------------------------------------------------------------------------


def _folded_here(state: FinalityState, names: tuple[Digest, ...]) -> tuple[FinalityState, bool, list[Action]]:
    """Is the state of this set known? If not: ask for what is missing, or for the check."""
    if names in state.checked:
        return state, True, []
    book = state.book
    known = [(e, *book.contributions[e]) for e in names if e in book.contributions]
    if len({author for _, author, _ in known}) != len(known):
        return state, False, []
    entries = book.unknown(names)
    payloads = tuple(entry for entry, _, _ in known if entry not in state.held)
    if entries or payloads:
        state, actions = _missing(state, entries, payloads)
        return state, False, actions
    if names in state.checking or state.applied != state.last_final:
        return state, False, []
    return replace(state, checking=state.checking | {names}), False, [CheckRound(_round(state), names)]


def _missing(state: FinalityState, entries: tuple[Digest, ...], payloads: tuple[Digest, ...]) -> Out:
    if (entries, payloads) == state.missing:
        return state, []
    return replace(state, missing=(entries, payloads)), [FetchMissing(_round(state), entries, payloads)]


def _append(state: FinalityState, body: Proposal | Vote | Prepare | Promise) -> Out:
    return replace(state, appending=body), [Append(body)]


def _may_append(state: FinalityState) -> bool:
    return state.appending is None and state.me in state.acceptors


def _round(state: FinalityState) -> Round:
    return Round(state.last_final + 1)
