"""How the deciding of rounds goes on when voters are gone: when this node signs, enters or leaves an epoch. Pure.

Rules in words: docs/epochs.md. What happens where two chains meet: forks.py.
"""

from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.chains.early_ballots import admit
from atoll.node.daemon.consensus.chains.epochs import EpochId, Segment, best_of
from atoll.node.daemon.consensus.chains.open_work import has_no_model, may_be_early, newest_rounds
from atoll.node.daemon.consensus.chains.past_books import parted
from atoll.node.daemon.consensus.presence import here_of, is_trying, note_presence, present_of, withheld
from atoll.node.daemon.consensus.proposer import MIN_PATIENCE_S
from atoll.node.daemon.consensus.standstill import Standstill
from atoll.node.daemon.consensus.voter import Out, append
from atoll.protocols.ids import PeerId, Round
from atoll.protocols.ledger.ballots import is_quorum, voter_order
from atoll.protocols.ledger.records import Epoch, Follow, epoch_id
from atoll.protocols.ledger.set_limit import first_authors
from atoll.protocols.ledger.turns import OwnerTurns

AWAY_ROUNDS = 8
"""Who contributed to none of so many newest rounds was away."""
LISTEN_S = 10.0
"""A node that has listened for less says of nobody that it is missing: leases arrive with the first exchanges."""
SHORT_PATIENCES = 0.25
"""Voters that are no quorum wait so long, in patiences, after the leases of the others have ended.

Each node counts a lease from when it received it, so all see the end within moments of each other.
"""


def enter_epoch(state: finality_types.FinalityState) -> Out:
    """Go on with an epoch that begins at the round that is decided now, if this node belongs to one."""
    if not state.epochs.places:
        return state, []  # nearly always, and this is asked at every event
    name = _to_enter(state)
    if name is None:
        return state, []
    first = state.deciding
    voters = voter_order(state.run, first, state.epochs.bodies[name].members)
    books, faults = admit(parted(state.books, state.last_final), state.waiting, first, name, voters)
    # Whom an epoch of long ago left out, which a node enters as it comes up, may have been down then.
    saw_it_begin = state.live and state.now - state.live_since >= state.lease_s
    left_out = here_of(state, state.voters) - {*voters} if saw_it_begin else frozenset[PeerId]()
    state = replace(
        state,
        books=books,
        chain=(*state.chain, Segment(name, first, state.electorate(first), state.tally.at_fork)),
        planned=state.planned[1:],
        voters=voters,
        turns=OwnerTurns(),
        accepted=state.accepted.union(voters),
        attempt=0,
        since=state.now,
        short_since=None,
        quorum_since=state.now,
        took_part=(),
        still=Standstill(),
        suspects=(state.suspects | left_out) - {*voters},
        reported=frozenset(),
    )
    reports = [finality_types.ReportEquivocation(first, *fault) for fault in faults]
    return state, [finality_types.EnterEpoch(name, first, voters), *reports]


def waits_for_epoch(state: finality_types.FinalityState) -> bool:
    """Whether the round is decided by an epoch that this node chose before it restarted, and by nobody else."""
    return bool(state.planned) and state.planned[0].round == state.deciding


def may_enter(state: finality_types.FinalityState) -> bool:
    """Whether the epoch that the round waits for (`waits_for_epoch`) has all its signatures."""
    body = state.planned[0]
    begun = state.epochs.children(body.parent, body.round)
    return bool(begun) and epoch_id(body) in begun  # the hash is costly, and mostly nothing begins there


def _to_enter(state: finality_types.FinalityState) -> EpochId | None:
    if state.planned:
        return epoch_id(state.planned[0]) if waits_for_epoch(state) and may_enter(state) else None
    # The replay is not in the order of what happened, so it enters only what this node chose before. And it enters
    # only when it can write that down at once.
    if not state.live or state.appending is not None:
        return None
    found = state.epochs.children(state.epoch, state.deciding)
    best = best_of(state.epochs, state.electorate(state.deciding), found) if found else None
    if best is None:
        return None
    # Also one that it signed and gave up: the others counted on its signature, and wait for it there.
    return best if state.me in state.epochs.signers[best] or _may_follow(state, best) else None


def open_epoch(state: finality_types.FinalityState) -> Out:
    """Sign an epoch of those that are here and take part, once they have been no quorum for long enough."""
    here = here_of(state, state.voters)
    state = note_presence(state, here)
    # By their leases they are a quorum, and only some of them found out who keeps back votes: these give up too,
    # and see the next ballots together with the others.
    is_early = state.short_since is None and state.asked_since is not None
    kept_back = withheld(state, here)
    # Where nobody keeps anything back, `note_presence` just counted the same voters.
    is_enough = is_quorum(state.voters, here - kept_back) if kept_back else state.short_since is None
    if is_enough or (is_early and not is_trying(state)):
        return _withdraw(state)
    if state.appending is not None or state.planned or wait_s(state) > 0:
        return state, []
    choice = state.epochs.choice(state.me)
    # An epoch that this node signed may still begin: another one is signed only after the others had time.
    if choice != state.epoch and state.now - state.signed_at < state.patience_s:
        return state, []
    if state.asked_since is not None:
        # Who came up since, or was cut off, may have seen no such ballot, and would sign no epoch without them.
        state = replace(state, took_part=(), suspects=frozenset())
    body = _to_sign(state)
    if body is None or epoch_id(body) == choice:
        return state, []
    return append(replace(state, signed_at=state.now), body)


def follow(state: finality_types.FinalityState) -> Out:
    """Write down the epoch that this node entered as somebody that is not one of its first members."""
    # At once: after a restart it must neither decide the round in the epoch before, nor enter another epoch with
    # weights of this one.
    choice = state.epochs.choice(state.me)
    if state.appending is not None or choice == state.epoch:
        return state, []
    body = state.epochs.bodies.get(choice)
    # What it signed may still begin here. It has given up what did not, or what another epoch outranked.
    if body is not None and (body.parent, body.round) == (state.epoch, state.deciding):
        return state, []
    return append(state, Follow(Round(state.chain[-1].first), state.epoch))


def wait_s(state: finality_types.FinalityState) -> float:
    """Seconds until those that take part, who are no quorum, may sign an epoch without the others."""
    if state.short_since is None:
        return 0.0  # the others are here, and had their time (presence.py)
    if _others_left(state):
        return 0.0  # their feeds are complete: nothing that they voted is unknown
    # Whom our epoch left out, and who decides by its work of before, is not waited for a second time.
    began = state.chain[-1]
    body = state.epochs.bodies.get(began.epoch)
    gone = {*began.electorate.voters}.difference(body.members) if body else frozenset[PeerId]()
    is_known = gone.issuperset({*state.voters} - here_of(state, state.voters))
    turn_s = 0.0 if is_known else SHORT_PATIENCES * state.patience_s
    # A node that just came up does not know who is there before a lease has passed.
    until = max(state.live_since + state.lease_s, state.short_since + turn_s)
    return max(0.0, until - state.now)


def _others_left(state: finality_types.FinalityState) -> bool:
    """Whether all voters and all candidates for an epoch that are not here left in good order."""
    for tier in _tiers(state):
        here = here_of(state, tier)
        if not all(state.epochs.has_left(peer, state.deciding, state.epoch) for peer in tier - here):
            return False
        if here:
            return True
    return False


def _withdraw(state: finality_types.FinalityState) -> Out:
    """Go back to the epoch before when one that this node signed does not begin, and a quorum is here."""
    is_due = state.asked_since is not None and state.now - state.signed_at >= state.patience_s
    if not is_due or state.appending is not None:
        return state, []
    state = replace(state, quorum_since=state.now, took_part=(), suspects=frozenset())
    return append(state, Follow(Round(state.chain[-1].first), state.epoch))


def _tiers(state: finality_types.FinalityState) -> Iterator[frozenset[PeerId]]:
    """Who may be members of an epoch: those of the first group of which anybody is here."""
    # The last final set may have had few authors, and all of these be gone. What strangers can join for nothing,
    # the open rounds, comes last.
    electorate = state.electorate(state.deciding)
    yield frozenset(electorate.voters)
    yield electorate.recent
    yield frozenset(newest_rounds(state))


def _to_sign(state: finality_types.FinalityState) -> Epoch | None:
    """The epoch to sign: one that others signed and that leaves none of us out, else our own."""
    book, number = state.epochs, state.deciding
    candidates, here = candidates_here(state)
    if state.me not in here or may_be_early(state, here):
        return None
    mine = Epoch(number, state.epoch, tuple(sorted(here)))
    # Members that are no candidates are refused: one liar among us could bring in any number of its own names,
    # and these would decide. What this node signed before and gave up still has its signature.
    proposed = {
        name: body
        for name, body in book.bodies.items()
        if body.parent == state.epoch
        and body.round == number
        and here <= set(body.members) <= candidates - withheld(state, candidates)
        and book.signers[name] & here
        and state.me not in book.signers[name]
    }
    others = best_of(book, state.electorate(number), proposed)
    return mine if others is None else proposed[others]


def candidates_here(state: finality_types.FinalityState) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
    """Who may be members of an epoch that is signed now, and those of them that are here: these sign it."""
    # Who left comes last: if all left in good order and came back, nobody else could decide the rounds between.
    tiers = [(tier, back) for back in (False, True) for tier in _tiers(state)]
    found = ((tier, present_of(state, tier, back=back)) for tier, back in tiers)
    candidates, here = next(((tier, here) for tier, here in found if here), (frozenset(), frozenset()))
    # Here may be everybody that writes into open rounds.
    return candidates, first_authors(state.run, state.deciding, here, state.seniority)


def _may_follow(state: finality_types.FinalityState, name: EpochId) -> bool:
    """Whether the others cannot decide the round without the members of an epoch, and are not more than these."""
    # The last group is costly and hardly ever needed; this is asked at every event while there is an epoch.
    if _outweighs(state, name, lambda group: group, _tiers(state)):
        return True
    # Some of the others may be alive without being known here yet.
    is_known = state.now - state.live_since >= state.patience_s
    # Sides that met may all have come to a chain whose last members had left it, and took its model along.
    if is_known and has_no_model(state):
        voters = frozenset(state.voters) - state.epochs.excluded_from(state.deciding)
        if state.epochs.on_side(name, voters):
            return True
    if is_known and _outweighs(state, name, lambda group: here_of(state, group), _tiers(state)):
        return True
    return went_on(state, name, _tiers(state))


def went_on(state: finality_types.FinalityState, name: EpochId, tiers: Iterable[frozenset[PeerId]]) -> bool:
    """Whether this node was away, and comes back where an epoch went on with most of those that did not stop."""
    # Voters that were all away come back, perhaps as a quorum. Those that stayed went on without them, and must
    # not lose that work to the first round that these decide. Only who just came up believes it: a liar that
    # writes contributions to far rounds misleads nobody that was here all the time.
    if state.away_since is None or not may_have_been_away(state):
        return False
    newest = newest_rounds(state)
    side = state.epochs.on_side(name, newest.keys())
    since = max((newest[peer] for peer in side), default=-1) - AWAY_ROUNDS
    if since <= state.deciding or newest.get(state.me, -1) >= since:
        return False
    # Who trained on while this node was away was here, and did not go to the epoch. A liar's far rounds must not
    # hide that; others that were away, too, have done hardly more than this node.
    worked_on = min(since, state.away_since + AWAY_ROUNDS // 2)
    there = frozenset(peer for peer, number in newest.items() if number >= worked_on)
    # A newcomer was away from all rounds. Who did none after the fork, and has no lease, did not train on.
    if state.now - state.live_since >= LISTEN_S:
        worked_on = min(since, state.deciding + AWAY_ROUNDS // 2)
        there = here_of(state, there) | {peer for peer in there if newest[peer] >= worked_on}
    return _outweighs(state, name, there.intersection, tiers)


def may_have_been_away(state: finality_types.FinalityState) -> bool:
    """Whether this node was down for long, and came up less than a lease ago."""
    return state.away_since is not None and state.live and state.now - state.live_since < state.lease_s


def come_up(state: finality_types.FinalityState, event: finality_types.ReplayDone) -> finality_types.FinalityState:
    """The state of a node that may vote from now on."""
    # Nobody goes on without a node while its lease lives, and going on far takes time. Who was down for less
    # is told of far rounds by liars only.
    was_away = event.down_s >= away_s(state)
    return replace(state, live=True, live_since=state.now, away_since=event.worked if was_away else None)


def away_s(state: finality_types.FinalityState) -> float:
    """For how many seconds a node must have been down to give up its side for those that went on."""
    # How long rounds take a node that just came up does not know.
    return state.lease_s + AWAY_ROUNDS * SHORT_PATIENCES * MIN_PATIENCE_S


def _outweighs(
    state: finality_types.FinalityState,
    name: EpochId,
    counting: Callable[[frozenset[PeerId]], frozenset[PeerId]],
    tiers: Iterable[frozenset[PeerId]],
) -> bool:
    """Whether an epoch outweighs the others that count, in the first group that has any of either.

    `counting`: those of some peers that count.
    """
    book, number = state.epochs, state.deciding
    for tier in tiers:
        tier = tier - book.excluded_from(number)
        side = book.on_side(name, tier)
        others = {peer for peer in counting(tier - side) if not book.has_left(peer, number, state.epoch)}
        if side or others:
            # So the others are no quorum either, which has two thirds.
            return len(side) >= len(others)
    return False
