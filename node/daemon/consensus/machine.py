"""Finality as a pure state machine: the voters agree once per round on its exact set of contributions.

Single-decree Paxos per round (Lamport, "Paxos Made Simple", 2001), one round at a time, with ledger entries for
messages: a promise or a vote is durable before anybody can see it, and a node that restarts replays its own feed
first (`ReplayDone` ends the replay). Rules in words: docs/finality.md.

1. The owner of attempt 0 proposes its view of the set.      Proposal
2. Members that fold it to the same state vote for it, if    Vote; ⌈2n/3⌉ of them make it final
   it names more than half of what they have (voter.py).
3. When nothing becomes final, the next owner asks first.    Prepare, Promise, then 1 with a higher ballot

A proposer with the promises of a quorum proposes what a quorum may have voted for before (`bound_proposals`), and
voters count the promises themselves: two different sets can never both become final.
"""

from collections.abc import Set
from operator import attrgetter, is_
from typing import cast, get_args

from msgspec.structs import astuple, replace

from atoll.node.daemon.consensus import proposer
from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.chains import epochs
from atoll.node.daemon.consensus.chains.early_ballots import admit, is_early, may_count, wait, without_early
from atoll.node.daemon.consensus.chains.looks import places_at
from atoll.node.daemon.consensus.chains.past_books import parted
from atoll.node.daemon.consensus.excision import corrections, note_final
from atoll.node.daemon.consensus.exclusion import note_excluded
from atoll.node.daemon.consensus.forks import change_chain, decided_before, deciders_of, look_for_better_chain
from atoll.node.daemon.consensus.orphans import fetch_orphans
from atoll.node.daemon.consensus.presence import note_part, note_standstill
from atoll.node.daemon.consensus.standstill import Standstill
from atoll.node.daemon.consensus.succession import (
    come_up,
    enter_epoch,
    follow,
    may_enter,
    may_have_been_away,
    open_epoch,
    waits_for_epoch,
)
from atoll.node.daemon.consensus.voter import Out, counts, fetch_missing, is_stuck, promise, report_narrow, vote
from atoll.protocols.ids import Digest, PeerId, RunId
from atoll.protocols.ledger.ballots import (
    Book,
    add_entry,
    add_orphan,
    but_acks,
    decided_proposal,
    has_votes,
    is_quorum,
    owner_of,
    voter_order,
    without,
    without_orphans,
)
from atoll.protocols.ledger.choices import Choice, choice_of
from atoll.protocols.ledger.probation import Tally
from atoll.protocols.ledger.records import Ballot, BallotBody, Epoch, EpochBody, Proposal, Vote

DECIDED_KEPT = 1024
"""Newest final rounds whose voters are remembered: an epoch that leaves our chain earlier is not looked at."""
_NO_ENTRIES, _EVERYBODY = Book(), Tally()
# By exact type: most entries are of none of these kinds, and to ask an instance of a union costs far more.
_OF_EPOCHS, _BALLOTS = frozenset([*get_args(EpochBody), Vote]), frozenset(get_args(BallotBody))


def begin(
    run: RunId,
    me: PeerId,
    rounds: int,
    owner: PeerId,
    *,
    lease_s: float = finality_types.LEASE_S,
    tally: Tally = _EVERYBODY,
    excise_rounds: int = 0,
    summary_every: int = 0,
    chosen: tuple[Epoch, ...] = (),
) -> finality_types.FinalityState:
    """The state before the first entry: the run's owner alone decides round 0.

    `lease_s`: how long leases live, in seconds. `tally`: of no round. `excise_rounds`, `summary_every`: see
    RunSpec (0: no summaries). `chosen`: the epochs that this node entered before, in order.
    """
    return finality_types.FinalityState(
        run=run,
        me=me,
        rounds=rounds,
        last_final=-1,
        voters=(owner,),
        tally=tally,
        lease_s=lease_s,
        excise_rounds=excise_rounds,
        summary_every=summary_every,
        planned=chosen,
        epochs=epochs.EpochBook(owner=owner),
    )


def step(state: finality_types.FinalityState, *events: finality_types.Event) -> Out:
    """The next state after these events, which happened together, and the actions that the node must perform."""
    actions: list[finality_types.Action] = []
    is_refused = False
    for event in events:
        state, more = _apply_event(state, event)
        actions += more
        is_refused = is_refused or type(event) is finality_types.AppendRefused
    # The disk refused: asking again at once would spin. The next event (a tick) asks again.
    if is_refused or (not state.live and _waits_for_votes(state)):
        return state, actions
    facts, seen = _facts_of(state), _seen_by_moves(state)
    if (facts, seen) == state.settled:
        return state, actions
    state, found = _decide(state)
    # The other moves look at the state after it, now and in the next step.
    facts, seen = (_facts_of(state), _seen_by_moves(state)) if found else (facts, seen)
    moved, more = _move(state)
    # Moves change no book of a round, and nothing else that they look at, without a change of these facts.
    is_still = not more and (moved is state or _facts_of(moved) == facts)
    return replace(moved, settled=(facts, seen) if is_still else ()), actions + found + more


def _move(state: finality_types.FinalityState) -> Out:
    """Everything that follows from the facts, once what they decide is decided."""
    actions: list[finality_types.Action] = []
    state = _admit(state)
    if state.live:
        state, is_outranked = look_for_better_chain(state)
        if is_outranked:
            # Whatever else this node would do belongs to a chain that it leaves.
            state, more = change_chain(state)
            return state, actions + more
    # Two histories of one length show in no exchange: who is stuck asks, and the proof may come with the answer.
    if state.live and (state.equivocators or is_stuck(state) or state.orphans_asked):
        state, more = fetch_orphans(state)
        actions += more
    if state.live and state.deciding < state.rounds:
        for move in (open_epoch, follow):
            state, more = move(state)
            actions += more
        # With neither a set of its own nor a ballot there is nothing to promise, to vote for or to propose.
        if state.deciding in state.views or state.books.get(state.deciding, _NO_ENTRIES).epochs:
            # One append at a time: the earlier move wins. A promise comes first, because it may forbid a vote.
            for move in (promise, vote, report_narrow, proposer.propose, proposer.prepare):
                state, more = move(state)
                actions += more
    return state, actions


_FACTS = finality_types.FinalityState.__struct_fields__.index("now")
_OF_BALLOTS = "prepares", "promises", "proposals", "votes", "epochs", "orphans", "other_votes"
_ballots_of, _but_work_of = attrgetter(*_OF_BALLOTS), attrgetter(*_OF_BALLOTS, "reductions", "bound")


def _facts_of(state: finality_types.FinalityState) -> tuple[object, ...]:
    """With `_seen_by_moves` all that the moves look at. While it is the same, what moved nothing does so again."""
    # Most entries are contributions, acks and payloads that change none of it, and each is an event.
    return astuple(state)[:_FACTS]


def _seen_by_moves(state: finality_types.FinalityState) -> list[object]:
    """What the moves look at of the books, the epochs, and the payloads that are held."""
    book = state.books.get(number := state.deciding, _NO_ENTRIES)
    if not state.live:
        return _seen_by_replay(state, book)
    # Until there is a ballot, or a set of our own, contributions and acks of the round wait for one.
    is_open = bool(book.epochs) or number in state.views
    # Of the votes in other rounds only what the order of chains depends on: many come when their round is final.
    seen: list[object] = [_work_seen(state, book, number) if is_open else None]
    seen += [state.epochs.unvoted, state.epochs.progress]
    if state.equivocators or state.orphans_asked or is_stuck(state):
        seen += [but_acks(state.books.get(segment.first, _NO_ENTRIES)) for segment in state.chain[1:]]
    else:
        seen += decided_before(state)
    if is_open:
        seen += [state.epochs.votes_against, state.epochs.excise_votes]
        seen += _but_work_of(book)
        # Only who owns the ballot that is due, or may open the next one because its owner is gone, waits for acks.
        owner = owner_of(state.voters, state.attempt)
        if owner == state.me or owner in state.lost or owner not in proposer.able_voters(state):
            seen.append(book.acks)
    # Who works in the open rounds counts only where voters are gone, an epoch begins, or this node was away.
    is_short = state.short_since is not None or state.asked_since is not None or bool(state.took_part)
    begins = state.epochs.places and (may_have_been_away(state) or state.epochs.children(state.epoch, number))
    is_moved = is_short or bool(begins)
    if is_moved:
        seen += parted(state.books, state.last_final).contributors()
    # Every wait is for a ballot, for a set of our own, or for one of these.
    if is_moved or state.still.tries:
        seen.append(state.now)
    elif book.prepares or number in state.views or state.stable_since is not None:
        seen.append(_time_seen(state, book))
    return seen


class _Work:
    """The contributions that a step looks at, and how many of them are held."""

    def __init__(self, source: tuple[object, ...], held: frozenset[Digest], names: Set[Digest]) -> None:
        """`source`: the objects that `names` follows from. While they are the same ones, so is what follows."""
        self.source, self.held, self.names = source, held, names
        self._here = len(held & names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Work) and (self._here, self.names) == (other._here, other.names)


def _work_seen(state: finality_types.FinalityState, book: Book, number: int) -> _Work:
    """What proposals and the own set name may come later. An idle node has no set but what it holds."""
    ours = state.views.get(number, ())
    source = book.contributions, book.proposals, ours, state.idle
    before = state.settled[1][0] if state.settled else None
    if isinstance(before, _Work) and all(map(is_, before.source, source)):
        return before if before.held is state.held else _Work(source, state.held, before.names)
    named = book.contributions.keys() if state.idle and not ours else book.in_proposals
    return _Work(source, state.held, named | (book.contributions.keys() & {*ours}))


def _time_seen(state: finality_types.FinalityState, book: Book) -> object:
    """What the moves look at of the time while all voters take part: it itself, or only which waits are over."""
    if book.prepares and any(ballot.attempt > state.attempt for ballot in book.prepares):
        return state.now  # each has a wait of its own (`_is_due`)
    over = may_have_been_away(state), state.now - state.since >= state.patience_s / 2  # voter.py: `_all_answered`
    if state.stable_since is None:
        return over
    # Nobody opens a later ballot for want of time before the round stood still for a patience (proposer.py).
    if proposer.waited_s(state) >= state.patience_s:
        return state.now
    return *over, state.now - state.stable_since >= state.patience_s


def _waits_for_votes(state: finality_types.FinalityState) -> bool:
    """Whether nothing can move in a replay: no epoch may begin, no proposal has the votes, no ballot is due."""
    # Most entries of a feed are votes and promises of which each changes what is looked at, and only some make a
    # set final, or a ballot due. None does where an epoch that was chosen begins: that waits for its signatures.
    if waits_for_epoch(state):
        return not may_enter(state)
    book = state.books.get(state.deciding, _NO_ENTRIES)
    return not (has_votes(book, len(state.voters)) or (book.prepares and _due(state)))


def _seen_by_replay(state: finality_types.FinalityState, book: Book) -> list[object]:
    """The same before this node takes part: then it decides, enters epochs that it chose, and counts ballots."""
    others = state.epochs
    seen: list[object] = [state.now, others.left, others.back, *_ballots_of(book)]
    # A set that is final waits for the contributions that it names, an epoch for its signatures.
    seen += [others.signers] if state.planned else []
    return [*seen, book.contributions, book.reductions] if state.missing else seen


# --- events become facts ------------------------------------------------------------------------


def _apply_event(state: finality_types.FinalityState, event: finality_types.Event) -> Out:
    match event:
        case finality_types.EntrySeen():
            return _entry_seen(state, event)
        case finality_types.EntryPayloadHeld(entry):
            return replace(state, held=state.held | {entry}), []
        case finality_types.FinalityTick(now):
            return _note_stable(replace(state, now=max(state.now, now))), []
        case finality_types.AuthorPruned(author):
            return _without(state, author), []
        case finality_types.OtherChainsSeen(entries):
            return replace(state, apart=entries), []
        case finality_types.RoundClosed(number, members):
            state = replace(state, views={**state.views, number: members}, closed=max(state.closed, number))
            return _note_stable(state), []
        case finality_types.CheckDone(number, names, digest, excised):
            if number != state.deciding:
                return state, []
            choice = Choice(names, excised)
            checked = {**state.checked, choice: digest}
            return replace(state, checked=checked, checking=state.checking - {choice}), []
        case finality_types.FinalApplied(number):
            # A worker that adopted a snapshot will not answer the checks that it was asked before.
            return replace(state, applied=number, checking=frozenset()), []
        case finality_types.ReductionRefuted(entry, is_proven):
            proven = state.proven | {entry} if is_proven else state.proven
            return replace(state, refuted=state.refuted | {entry}, proven=proven), []
        case finality_types.ReductionCleared(entry):
            return replace(state, refuted=state.refuted - {entry}), []
        case finality_types.CorrectionsHeld(peers):
            return replace(state, retrievable=peers), []
        case finality_types.SummaryMade(number, summary):
            return replace(state, summary=(number, summary)), []
        case finality_types.AppendRefused():
            return replace(state, appending=None), []
        case finality_types.ReplayDone():
            return come_up(state, event), []
        case finality_types.MembersSeen(peers, lost):
            is_known = (peers, lost) == (state.members, state.lost)
            return state if is_known else replace(state, members=peers, lost=lost), []
        case finality_types.EquivocatorsSeen(peers):
            return replace(state, equivocators=peers), []
        case finality_types.Idle(idle, now):
            return _note_stable(replace(state, idle=idle, now=max(state.now, now))), []


def _entry_seen(state: finality_types.FinalityState, event: finality_types.EntrySeen) -> Out:
    body = event.body
    if event.is_orphan:
        return _orphan_seen(state, event)
    if event.author == state.me and body == state.appending:
        state = replace(state, appending=None)
    kind = type(body)
    if kind in _OF_EPOCHS:
        state = replace(state, epochs=epochs.add_entry(state.epochs, event.author, body))
        if kind is not Vote and isinstance(body, EpochBody):
            return state, []
    if kind in _BALLOTS:
        given = cast(BallotBody, body)
        has_left = state.epochs.has_left(event.author, given.round, given.ballot.epoch)
        if has_left and kind is not Vote:
            return state, []
        if not may_count(state.chain, state.voters, state.deciding, event.author, given):
            if is_early(state.chain, state.deciding, given) and given.round < state.rounds:
                waiting = wait(state.waiting, event.entry, event.author, given, has_left=has_left)
                state = replace(state, waiting=waiting)
            return state, []
        if has_left:
            return _orphan_seen(state, event)
    if not _is_looked_at(state, body.round):
        return state, []
    before = state.books.get(body.round, _NO_ENTRIES)
    book, fault = add_entry(before, event.entry, event.author, body)
    state = replace(state, books=parted(state.books, state.last_final).put(int(body.round), book))
    if kind in _BALLOTS and isinstance(body, Proposal) and body.round == state.deciding:
        # The first proposal of the newest ballot restarts the patience: its voters need time to fold it. A second
        # one would be equivocation, and must not win its author more time.
        newest = body.ballot.attempt == state.attempt and counts(state, body.ballot)
        if newest and body.ballot.proposer == event.author and body.ballot not in before.first_proposals():
            state = replace(state, since=state.now)
    if not fault:
        return state, []
    return state, [finality_types.ReportEquivocation(body.round, event.author, event.entry, fault)]


def _is_looked_at(state: finality_types.FinalityState, number: int) -> bool:
    # What the epoch before knows of the first round of ours may come late, and show that it decided that round.
    is_open = state.last_final < number < state.rounds
    return is_open or bool(places_at(state.chain, number))


def _without(state: finality_types.FinalityState, author: PeerId) -> finality_types.FinalityState:
    """The state after the ledger let go of an author: as after a restart, which would find nothing of it."""
    deciders = deciders_of(state)
    books, others = parted(state.books, state.last_final), epochs.without(state.epochs, author, deciders)
    # The ledger hears who is accepted only after this machine found it: what a decider wrote is not forgotten.
    waiting = state.waiting
    if author not in deciders:
        books = books.each(lambda book: without_orphans(book, author))
        waiting = without_early(waiting, author)
    books = books.each(lambda book: without(book, author, state.held))
    return replace(state, books=books, epochs=others, waiting=waiting)


def _orphan_seen(state: finality_types.FinalityState, event: finality_types.EntrySeen) -> Out:
    """An entry of another history, or a vote that its feed forbids: that one counts if its author has two."""
    if isinstance(event.body, Epoch):
        return replace(state, epochs=epochs.add_orphan(state.epochs, event.author, event.body)), []
    number = event.body.round
    if not _is_looked_at(state, number):
        return state, []
    book = add_orphan(state.books.get(number, Book()), event.entry, event.author, event.body)
    return replace(state, books=parted(state.books, state.last_final).put(int(number), book)), []


def _admit(state: finality_types.FinalityState) -> finality_types.FinalityState:
    """Let later ballots count as soon as they are due: from then on older ones get no promise."""
    due = _due(state)
    return note_standstill(replace(note_part(state), attempt=max(due), since=state.now)) if due else state


def _due(state: finality_types.FinalityState) -> list[int]:
    """The attempts of later ballots that are due."""
    later = [b for b in state.book.prepares if b.attempt > state.attempt]
    later = [b for b in later if owner_of(state.voters, b.attempt) == b.proposer]
    return [ballot.attempt for ballot in later if _is_due(state, ballot)]


def _is_due(state: finality_types.FinalityState, ballot: Ballot) -> bool:
    """Whether the owner of the attempt before had half a turn at least, or more than a third found that it had."""
    count, ahead = len(state.voters), ballot.attempt - state.attempt
    # More than a third that answered are not all liars, so an honest voter found the ballot due: a node that comes
    # late or was cut off need not wait again.
    if ballot.proposer == state.me or 3 * state.book.answers(state.voters, ballot) > count:
        return True
    if ahead > count:
        return False  # each owner has one attempt among n
    # Without this wait an owner that opens its ballots as it likes would cut off those of the others for ever.
    # Half a turn, because clocks and arrivals differ.
    waited, many = state.now - state.since, 1 + state.attempt // count
    turns = max(0, proposer.waits(state, ballot.attempt) - 0.5) * many
    if waited >= turns * state.patience_s:
        return True
    # Those that went ahead while this node was gone answer no ballot below any more. Only among the first n
    # ballots: each liar has one of these, and so many do not make the waits longer.
    is_early = ballot.attempt >= count or waited < 0.5 * many * state.patience_s
    return not is_early and not _may_decide_below(state, ballot)


def _may_decide_below(state: finality_types.FinalityState, ballot: Ballot) -> bool:
    """Whether those that are here and answered neither this ballot nor a higher one are a quorum."""
    book, here = state.book, proposer.able_voters(state)
    bound = [book.answered_by(here, at) for at in {*book.promises, *book.votes} if at >= ballot]
    return is_quorum(state.voters, {*here}.difference(*bound))


def _note_stable(state: finality_types.FinalityState) -> finality_types.FinalityState:
    """Remember since when this node does not expect the set of the next round to grow."""
    # Once this node closed the round after it, what was late has come; an idle node closes no round any more.
    stable = state.idle or state.closed > state.deciding
    if not stable:
        return state if state.stable_since is None else replace(state, stable_since=None)
    return state if state.stable_since is not None else replace(state, stable_since=state.now)


# --- deciding -----------------------------------------------------------------------------------


def _decide(state: finality_types.FinalityState) -> Out:
    """Move over every round that the ledger proves final."""
    actions: list[finality_types.Action] = []
    while state.deciding < state.rounds:
        book = state.book
        found = None if waits_for_epoch(state) else decided_proposal(book, state.voters, state.equivocators)
        if found is None:
            state, entered = enter_epoch(state)
            if not entered:
                break
            actions += entered
            continue
        _, proposal = found
        # The authors of all that the set names decide the next round: it cannot begin before they are known.
        if unknown := book.unknown(proposal.contributions):
            state, more = fetch_missing(state, finality_types.FetchMissing(state.deciding, unknown, (), None))
            return state, actions + more
        choice = choice_of(proposal)
        changed = corrections(state, choice.excised) if choice.excised else ()
        state, more = _next_round(state, book, proposal)
        actions.append(
            finality_types.FinalizeRound(
                proposal.round, proposal.contributions, proposal.state, changed, frozenset(state.voters)
            )
        )
        actions += more
        if state.excise_rounds:
            state = note_final(state, book, choice)
        if choice.excluded:
            state = note_excluded(state, choice.excluded)
        if state.summary_every and state.deciding % state.summary_every == 0:
            actions.append(finality_types.Summarize(state))
    return state, actions


def _next_round(state: finality_types.FinalityState, book: Book, final: Proposal) -> Out:
    """The state that decides the round after, with the proven authors of the final set as its voters."""
    number, names = state.deciding, book.contributions.keys() & final.contributions
    authors = book.authors_of(names)
    proven = state.tally.proven(authors, state.voters)
    books = parted(state.books, state.last_final).after(number, is_fork=bool(places_at(state.chain, number)))
    waiting = {at: early for at, early in state.waiting.items() if at > number}
    voters = voter_order(state.run, number + 1, proven)
    proven = _remembered(state, frozenset(voters))
    books, faults = admit(books, waiting, number + 1, state.epoch, voters)
    decided = {at: found for at, found in state.decided.items() if at > number - DECIDED_KEPT}
    done = replace(
        state,
        last_final=number,
        decided={**decided, number: (state.voters, proven)},
        turns=state.turns.after(number, state.voters, final.ballot.attempt, voters),
        voters=voters,
        tally=state.tally.after(authors, ((name, *book.contributions[name]) for name in names), proven),
        accepted=state.accepted if authors <= state.accepted else state.accepted | authors,
        books=books,
        waiting=waiting,
        held=state.held & books.names(),
        views={at: view for at, view in state.views.items() if at > number},
        checked={},
        checking=frozenset(),
        missing={},
        reported=frozenset(),
        attempt=0,
        since=state.now,
        quorum_since=state.now,
        took_part=(),
        still=Standstill(),
        stable_since=None,
    )
    return _note_stable(done), [finality_types.ReportEquivocation(done.deciding, *fault) for fault in faults]


def _remembered(state: finality_types.FinalityState, proven: frozenset[PeerId]) -> frozenset[PeerId]:
    """The equal set of an earlier round, where one is remembered: members come and go, and come again."""
    # One of eight members takes 728 bytes, and a thousand rounds are remembered.
    return next((before for _, before in state.decided.values() if before == proven), proven)
