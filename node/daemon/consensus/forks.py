"""Where two chains of epochs meet: which one every node follows, and how this node changes to it. Pure.

The ledger decides, so nodes that have the same entries choose the same chain; leases only keep a node for a while
from leaving a round that it just decided (`_waiting`). Rules in words: docs/epochs.md.
"""

from collections.abc import Collection, Iterator
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.chains.epochs import ROOT, Electorate, EpochBook, EpochId, best_of, exempt_of
from atoll.node.daemon.consensus.chains.looks import begun_before
from atoll.node.daemon.consensus.chains.past_books import ballots_before, parted
from atoll.node.daemon.consensus.succession import may_have_been_away, went_on
from atoll.node.daemon.consensus.voter import Out, append
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.ballots import Book, decided_proposal
from atoll.protocols.ledger.records import Follow

MEETINGS_KEPT = 8
"""Answers of `_meetings_of` that are remembered with the epochs that they follow from."""


class _Fork(NamedTuple):
    """A round at which our chain and another part."""

    number: int
    parent: EpochId
    electorate: Electorate
    """Who decides the round in the parent, if they weigh."""
    authors: frozenset[PeerId]
    """Proven authors of the set that the parent decided, if they weigh; empty: it decided none."""
    ours: EpochId
    """The epoch that decides the round in our chain."""


def look_for_better_chain(state: finality_types.FinalityState) -> tuple[finality_types.FinalityState, bool]:
    """Whether this node must leave its chain for another; the state remembers what was looked at."""
    if not state.epochs.places:
        return state, False
    looked_at = _looked_at(state)
    if looked_at == state.unrivalled:
        return state, False
    if _outranked(state) is not None:
        return state, True
    return replace(state, unrivalled=looked_at), False


def _looked_at(state: finality_types.FinalityState) -> tuple[object, ...]:
    """All that `_outranked` depends on: the same things, one answer."""
    # Of the votes only their progress: each voter has a new one in each round.
    known = state.epochs.unvoted, state.epochs.progress
    # Who lives counts only where others work in a chain that leaves ours at a round that we decided (`_waiting`).
    live = state.members if _meetings_of(state) else None
    # Where the others work counts only while this node may have been away (`went_on`).
    is_away = may_have_been_away(state)
    books = decided_before(state)
    if is_away:
        books += parted(state.books, state.last_final).contributors()
    return state.deciding, is_away, live, state.equivocators, state.chain, *known, *books


def decided_before(state: finality_types.FinalityState) -> list[object]:
    """All that may show that an epoch before decided a round at which one of our chain began."""
    books, count = parted(state.books, state.last_final), begun_before(state.chain, state.deciding)
    found: list[object] = [books.past.ballots(state.chain, count)]
    for at in range(count, len(state.chain)):
        found += ballots_before(state.chain, at, books.coming)
    return found


def change_chain(state: finality_types.FinalityState) -> Out:
    """Leave a chain that another one outranks: write down the choice first, then begin again with it."""
    lost = _outranked(state)
    if lost is None or state.appending is not None:
        return state, []
    first, better = lost
    # The choice is durable before anything else happens: from then on this node votes in the old chain no more.
    if state.epochs.choice(state.me) != better:
        return append(state, Follow(Round(first), better))
    return state, [finality_types.SwitchEpoch(better, Round(first))]


def _outranked(state: finality_types.FinalityState) -> tuple[int, EpochId] | None:
    """The first round at which another chain outranks ours, and its epoch."""
    # The first: what comes after it belongs to one of the two chains only.
    for fork in sorted(_forks(state)):
        winner = _to_return_to(state, fork) or _winner(state.epochs, fork, _waiting(state, fork))
        if winner != fork.ours:
            return fork.number, winner
    return None


def _forks(state: finality_types.FinalityState) -> Iterator[_Fork]:
    # Of an author with two histories nodes hold different choices and votes: it weighs nothing.
    liars = state.equivocators
    # Epochs that this node entered: another may have begun in the same place, or the parent decided after all.
    for at in _disputable(state):
        before, segment = state.chain[at - 1], state.chain[at]
        book = state.books.get(segment.first, Book()).within(before.epoch)
        exempt = exempt_of(state.chain[:at], segment.first, segment.electorate.voters)
        book = book.bounded(segment.tally, exempt)
        found = decided_proposal(book, segment.electorate.voters, liars)
        named = book.authors_of(found[1].contributions) if found else ()
        authors = segment.tally.proven(named, segment.electorate.voters) if found else frozenset[PeerId]()
        weighing = segment.electorate.without(liars)
        yield _Fork(segment.first, before.epoch, weighing, (authors - liars) or authors, segment.epoch)
    # Epochs that deciders entered at a round that our chain decided without them. One that all of these left again
    # outranks nothing, and of others anybody can open as many as it likes: none of these is looked at.
    for parent, number in _meetings_of(state):
        weighing, authors = state.electorate(number).without(liars), state.decided[number][1]
        yield _Fork(number, parent, weighing, (authors - liars) or authors, parent)


def _disputable(state: finality_types.FinalityState) -> set[int]:
    """The places in our chain that another may outrank: where votes are here, or other epochs began as well."""
    # At all others our epoch is the only one, and the one before it decided nothing: whoever weighs, ours wins.
    chain, count = state.chain, begun_before(state.chain, state.deciding)
    past = parted(state.books, state.last_final).past
    return {*past.voted(chain, count), *range(count, len(chain)), *state.epochs.rivals(chain)}


def _meetings_of(state: finality_types.FinalityState) -> list[tuple[EpochId, int]]:
    """Where deciders left our chain at rounds that it decided: the epoch and the round; sorted."""
    # Asked at nearly every event, and votes change nothing of this. A chain is known by its newest epoch.
    known, place = state.epochs.meetings, (state.epoch, int(state.deciding))
    if place not in known:
        if len(known) >= MEETINGS_KEPT:
            known.clear()
        ends = [segment.first for segment in state.chain[1:]] + [int(state.deciding)]
        spans = {segment.epoch: (segment.first, end) for segment, end in zip(state.chain, ends, strict=True)}
        left = _left_at(state.epochs, spans.keys(), deciders_of(state))
        inside = ((parent, number) for parent, number in left if spans[parent][0] <= number < spans[parent][1])
        known[place] = sorted(at for at in inside if at[1] in state.decided)
    return known[place]


def _left_at(book: EpochBook, chain: Collection[EpochId], peers: Collection[PeerId]) -> set[tuple[EpochId, int]]:
    """Where the ways to what some peers chose leave a chain: its epoch, and the round of the next one."""
    trunk = frozenset(chain)
    choices = {book.chosen[peer] for peer in peers if peer in book.chosen}.difference(trunk)
    bodies = [book.bodies[name] for choice in choices if (name := book.leaves(choice, trunk)) is not None]
    return {(body.parent, int(body.round)) for body in bodies} & book.places.keys()


def disputed(state: finality_types.FinalityState) -> list[tuple[int, tuple[PeerId, ...]]]:
    """Our rounds from which on live deciders may work in another chain, rising, with the voters before that."""
    book, own = state.epochs, {segment.epoch for segment in state.chain}
    live = state.members - state.equivocators if len(own) > 1 else frozenset[PeerId]()
    if all(book.choice(peer) == state.epoch for peer in live):
        return []  # mostly, and this is asked at every event while there is an equivocator
    choices = {book.choice(peer) for peer in live & deciders_of(state)}
    last = {next(name for name in (*book.ancestors(each), ROOT) if name in own) for each in choices}
    pairs = pairwise(state.chain)
    return [(segment.first, segment.electorate.voters) for before, segment in pairs if before.epoch in last]


def deciders_of(state: finality_types.FinalityState) -> frozenset[PeerId]:
    """Who decided one of the rounds that are remembered, or may decide one in a chain that outranks ours."""
    authors = {proven for _, proven in state.decided.values()}  # mostly one and the same
    groups = [state.epochs.signers.get(segment.epoch, frozenset[PeerId]()) for segment in state.chain]
    voters = [segment.electorate.voters for segment in state.chain]
    groups += [segment.electorate.recent for segment in state.chain]
    return frozenset(state.voters).union(*authors, *groups, *voters)


def _to_return_to(state: finality_types.FinalityState, fork: _Fork) -> EpochId | None:
    """The epoch in which others went on while this node was away; None if there is none, or it was not away."""
    # The larger side of a fork may be gone for long. When it comes back it would win, and undo all that was done
    # since; so those that come back give up their side themselves.
    if not may_have_been_away(state):
        return None
    names = {*state.epochs.children(fork.parent, fork.number)} - {fork.ours}
    if state.epochs.excluded:
        free = _free_of(state.epochs, fork.electorate)
        names = {name for name in names if state.epochs.on_side(name, free)}
    best = best_of(state.epochs, fork.electorate, names)
    return best if best is not None and went_on(state, best, [frozenset(fork.electorate.voters)]) else None


def _waiting(state: finality_types.FinalityState, fork: _Fork) -> frozenset[PeerId]:
    """Next voters that live and decided the round in the parent with us: perhaps they had no time yet to go on."""
    # Without them one voter that opens an epoch right after a round became final would undo it: one against none.
    # Who just came up may have been away while the epoch went on, and who is in it decided nothing in the parent:
    # for these the ledger alone counts.
    if fork.ours != fork.parent or may_have_been_away(state):
        return frozenset()
    there = fork.authors & (state.members | {state.me})
    return frozenset(peer for peer in there if state.epochs.choice(peer) == fork.parent)


def _winner(book: EpochBook, fork: _Fork, waiting: frozenset[PeerId]) -> EpochId:
    """The epoch that every node follows from a fork on."""
    # Strangers can open as many epochs of strangers as they like. These outrank nothing.
    excluded = book.excluded_from(fork.number)
    known = fork.electorate.recent.union(fork.electorate.voters) - excluded
    children = [
        name
        for name in book.children(fork.parent, fork.number)
        if name == fork.ours or not known.isdisjoint(book.bodies[name].members)
    ]
    stay = (_stayed(book, fork, fork.authors) | waiting) - excluded
    children, has_parent = _that_go_on(book, fork, children, stay)
    best = best_of(book, fork.electorate, children)
    if best is None or not has_parent:
        return fork.parent if best is None else best
    # The parent decided the round after all. Those of its next voters who go on from there weigh against the
    # voters who went to the epoch, and win a tie, unless these went on for much longer: at a tie one of them
    # voted for that set, and the epoch began with it. A decision that nobody goes on from was seen by nobody.
    moved = book.on_side(best, known.intersection(fork.electorate.voters))
    voters = len(fork.electorate.voters)
    longer = book.length(moved, fork.number, voters) > book.length(stay, fork.number, voters)
    return best if (len(moved), longer) > (len(stay), False) else fork.parent


def _that_go_on(
    book: EpochBook, fork: _Fork, children: list[EpochId], stay: set[PeerId]
) -> tuple[list[EpochId], bool]:
    """The epochs of a fork, and whether its parent counts: those in which somebody works whom the owner left in.

    All of them where there is none.
    """
    barred, decides = book.excluded.keys(), bool(fork.authors)
    if not barred:
        return children, decides
    # Whom the owner excludes from a later round still weighs at the fork. But a chain of these alone ends there,
    # and nobody takes its model from them: all others would stand still for good.
    free = _free_of(book, fork.electorate)
    able = [name for name in children if book.on_side(name, free)]
    is_able = decides and not (stay | _stayed(book, fork, free)) <= barred
    return (able, is_able) if able or is_able else (children, decides)


def _free_of(book: EpochBook, electorate: Electorate) -> frozenset[PeerId]:
    """Who weighs at a fork, and the owner, without those that the owner excluded from any round."""
    return electorate.recent.union(electorate.voters, {book.owner}) - book.excluded.keys()


def _stayed(book: EpochBook, fork: _Fork, peers: Collection[PeerId]) -> set[PeerId]:
    """Those of some peers that went on from there: they voted in the parent after the round, or left it later."""
    # Many authors, few choices: the chains of parents are walked once a choice.
    choices = {peer: book.choice(peer) for peer in peers}
    left_by = {choice: book.branch(fork.parent, choice) for choice in {*choices.values()}}
    voted = {peer for peer in peers if book.voted.get(peer, -1) > fork.number}
    at_home = {choice for choice, name in left_by.items() if name == fork.parent}
    gone = {choice: book.bodies[name] for choice, name in left_by.items() if name and choice not in at_home}
    later = {choice for choice, body in gone.items() if body.round > fork.number}
    stays = {peer for peer, choice in choices.items() if choice in at_home} & voted
    return stays | {peer for peer, choice in choices.items() if choice in later}
