"""Who of the voters is here, and who of these takes no part. Pure.

A lease says that a voter lives, not that it helps to decide. Liars that renew their leases and keep back votes, or
their signatures under an epoch, would stop the others for ever once a few more are gone. Rules: docs/epochs.md.
"""

from typing import TypeAlias

from msgspec.structs import replace

from atoll.node.daemon.consensus import types as finality_types
from atoll.node.daemon.consensus.chains.epochs import EpochId
from atoll.node.daemon.consensus.standstill import Standstill
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.ballots import owner_of, quorum
from atoll.protocols.ledger.records import Ballot

Group: TypeAlias = tuple[PeerId, ...] | frozenset[PeerId]
FOUND_KEPT = 32
"""Answers of `here_of` that are remembered with the epochs that they follow from."""
BALLOTS = 2
"""Who took part in none of so many newest ballots keeps back its votes."""
STILL_BALLOTS = 4
"""After so many ballots that decided nothing, and as many again, those that missed one are left out in a try."""
TRY_TURNS = 3
"""A try lasts so many leases and patiences at most: in one it finds who signs nothing, in two who signs others."""


def here_of(state: finality_types.FinalityState, peers: Group, *, back: bool = False) -> frozenset[PeerId]:
    """Those with a live lease that did not leave and work in this epoch or in one before it.

    `back`: also those that left and came back. Whom the run excluded is gone.
    """
    book, number = state.epochs, state.deciding
    # Asked at nearly every event, and most events change nothing of this. A chain is known by its newest epoch.
    asked = peers, back, state.members, number, state.epoch, state.equivocators
    found = book.found_here.get(asked)
    if found is None:
        if len(book.found_here) >= FOUND_KEPT:
            book.found_here.clear()
        found = book.found_here[asked] = _here_of(state, peers, back=back)
    return found


def _here_of(state: finality_types.FinalityState, peers: Group, *, back: bool) -> frozenset[PeerId]:
    book, number = state.epochs, state.deciding
    live = (state.members | {state.me}).intersection(peers)
    gone = {peer for peer in live & book.left.keys() if not back and book.has_left(peer, number, state.epoch)}
    strange = [peer for peer in live & book.chosen.keys() if book.chosen[peer] != state.epoch]  # mostly nobody
    known = {segment.epoch for segment in state.chain} if strange else set[EpochId]()
    strange = [peer for peer in strange if book.chosen[peer] not in known]
    elsewhere = {peer for peer in strange if book.begun(book.chosen[peer]) not in known}
    # No node gets another entry of an equivocator, so it can neither vote nor sign an epoch.
    return live - gone - elsewhere - book.excluded_from(number) - state.equivocators


def present_of(state: finality_types.FinalityState, peers: Group, *, back: bool = False) -> frozenset[PeerId]:
    """Those of `here_of` that keep back neither their votes nor their signature."""
    here = here_of(state, peers, back=back)
    return here - withheld(state, here)


def withheld(state: finality_types.FinalityState, peers: Group) -> frozenset[PeerId]:
    """Those that are here, and keep back their votes in this round or their signature under its epochs."""
    if not state.took_part and state.asked_since is None and not state.still.tries:
        return frozenset()  # nearly always, and this is asked at every event
    here = here_of(state, peers, back=True)
    return withheld_votes(state) & here | _withheld_signatures(state, here)


def withheld_votes(state: finality_types.FinalityState) -> frozenset[PeerId]:
    """Voters that took part in neither of the two newest ballots of a round that has been open for a lease.

    Of those that an epoch left out while they were here (`suspects`), or most leave out now: not in the newest.
    In a try (`is_trying`): those that missed one of four.
    """
    if is_trying(state):
        return state.still.blamed & here_of(state, state.voters)
    if not state.took_part or state.stable_since is None:
        return frozenset()
    here = here_of(state, state.voters)
    signers, absent = _signers(state, here), here - state.took_part[0]
    again = absent & state.suspects
    if _are_most(state, signers, here):
        # They give up after a patience, which a second ballot may take to begin: one is enough.
        again |= {one for one in absent if _are_most(state, _signers(state, here, one), here)}
    # A lease: as long as a voter has that is gone. Two ballots: a slow voter may miss the turn of one.
    since = max(state.stable_since, state.quorum_since, state.live_since)
    # Once one of us signed, the others must do so before it gives up again: their leases began at other times.
    is_over = state.now - since >= state.lease_s or not signers <= {state.me}
    if len(state.took_part) < BALLOTS or not is_over:
        return again
    return here - frozenset().union(*state.took_part) | again


def note_part(state: finality_types.FinalityState) -> finality_types.FinalityState:
    """Remember who took part in the newest ballot, when a later one begins to count.

    What comes after its turn changes nothing: a liar could promise at the last moment each time.
    """
    here = here_of(state, state.voters)
    ballot = Ballot(state.attempt, owner_of(state.voters, state.attempt), state.epoch)
    voted = frozenset(state.book.voted_in(here, ballot))
    # Most voted: who only promised kept back its vote. Else nothing was proposed that honest voters vote for.
    part = voted if _are_most(state, voted, here) else here & state.book.answered_by(here, ballot)
    if not state.live or not _are_most(state, part, here):
        return state
    # Who is away misses nothing. What it missed before stays: a liar could let its lease end for a moment.
    parts = (part.union({*state.voters} - here), *state.still.parts[: STILL_BALLOTS - 1])
    return replace(
        state,
        took_part=(part, *state.took_part[: BALLOTS - 1]),
        suspects=state.suspects - part,
        still=replace(state.still, parts=parts),
    )


def is_trying(state: finality_types.FinalityState) -> bool:
    """Whether this node signs epochs without those that missed ballots, though a quorum is here by its leases."""
    still = state.still
    if not still.blamed or state.now - state.live_since < state.lease_s:
        return False
    if state.short_since is not None:  # an epoch begins without a try; blame differs from node to node
        return False
    # Who signs votes nowhere: should most others not sign, it votes on.
    tried_s, here = state.now - still.since, here_of(state, state.voters)
    is_most = _are_most(state, _signers(state, here) | {state.me}, here)
    return tried_s < state.patience_s or (is_most and tried_s < TRY_TURNS * (state.lease_s + state.patience_s))


def note_standstill(state: finality_types.FinalityState) -> finality_types.FinalityState:
    """Begin another try with a ballot after enough that more than a third answered, and that decided nothing.

    Liars that miss ballots in turn never miss two in a row. All nodes count the same ballots in their ledgers, so
    they begin at about the same time, and whom they saw miss one stays the same until the try is over.
    """
    book, voters, parts = state.book, state.voters, state.still.parts
    over = [at for at in {*book.promises, *book.votes} if at.attempt < state.attempt]
    failed = sum(3 * len(book.answered_by(voters, at)) > len(voters) for at in over)
    if not state.live or failed // STILL_BALLOTS <= state.still.tries:
        return state
    missed = here_of(state, voters) - frozenset(voters).intersection(*parts) - {state.me}
    # All others took part in each. Otherwise the network fails: honest ones would be left out, and liars be more.
    is_clear = len(parts) >= STILL_BALLOTS and 3 * len(missed) < len(voters)
    blamed = missed if is_clear else frozenset[PeerId]()
    return replace(state, still=Standstill(parts, failed // STILL_BALLOTS, state.now, blamed))


def note_presence(state: finality_types.FinalityState, here: frozenset[PeerId]) -> finality_types.FinalityState:
    """Remember since when the voters that are `here` are a quorum, or are none, or wait for signatures."""
    if len(here) < quorum(len(state.voters)):
        short_since = state.now if state.short_since is None else state.short_since
        state = replace(state, short_since=short_since)
    elif state.short_since is not None:
        # Who came back just now could take part in no ballot before.
        state = replace(state, short_since=None, quorum_since=state.now, took_part=())
    choice = state.epochs.choice(state.me)
    waits = not (any(choice == each.epoch for each in reversed(state.chain)) or state.epochs.is_complete(choice))
    if waits == (state.asked_since is None):
        state = replace(state, asked_since=state.now if waits else None)
    return state


def _withheld_signatures(state: finality_types.FinalityState, here: frozenset[PeerId]) -> frozenset[PeerId]:
    """Those that signed no epoch at this place, long after this node and most of those here did.

    After as long again: those that did not sign the newest one of this node, if most of those here did.
    """
    turn_s = state.lease_s + state.patience_s
    if state.asked_since is None or state.now - state.asked_since < turn_s:
        return frozenset()
    # At first any epoch will do, because nodes see others come and go at other times. But one of its own costs a
    # liar nothing, and the others would wait for ever.
    signed = here & state.epochs.signers.get(state.epochs.choice(state.me), frozenset())
    is_late = state.now - max(state.asked_since + 2 * turn_s, state.signed_at + state.patience_s) >= 0
    signers = signed if is_late and _are_most(state, signed, here) else _signers(state, here)
    return here - signers if _are_most(state, signers, here) else frozenset()


def _signers(state: finality_types.FinalityState, here: frozenset[PeerId], without: str = "") -> frozenset[PeerId]:
    """Those whose choice is an epoch that begins at the round that is decided now, and does not name `without`."""
    book, place = state.epochs, (state.epoch, state.deciding)
    chosen = ((peer, book.bodies.get(book.choice(peer))) for peer in here)
    bodies = {peer: body for peer, body in chosen if body and (body.parent, body.round) == place}
    return frozenset(peer for peer, body in bodies.items() if without not in body.members)


def _are_most(state: finality_types.FinalityState, some: frozenset[PeerId], here: frozenset[PeerId]) -> bool:
    """Whether some are more than half of those that are here; of two halves, the own one."""
    return 2 * len(some) + (state.me in some) > len(here)
