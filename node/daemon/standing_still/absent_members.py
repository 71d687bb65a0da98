"""Who or which model a node misses, why a member is away, and what happens next: lines for its user. Pure."""

from collections.abc import Callable, Container, Iterable, Mapping
from itertools import pairwise

from msgspec.structs import replace

from atoll.node.daemon.consensus.presence import STILL_BALLOTS, present_of, withheld
from atoll.node.daemon.consensus.succession import LISTEN_S, SHORT_PATIENCES, away_s, candidates_here, wait_s
from atoll.node.daemon.consensus.types import FinalityState
from atoll.node.daemon.rounds.participants import MemberView
from atoll.node.daemon.rounds.state import Phase, RoundState
from atoll.node.daemon.standing_still.stillness import FETCHES, LEAST_S, Stillness
from atoll.protocols.ids import Digest, PeerId
from atoll.protocols.ledger.ballots import is_quorum
from atoll.protocols.ledger.registers import Lease
from atoll.protocols.local.control_messages import PeerStatus

_SHOWN = 4
TWO_HISTORIES = "signed two histories (a copied home, or an old backup): nothing new of it counts"
OVERDUE = 0.5
"""A lease of which less than this share is left was not renewed: that is due after a third of it."""


Leases = Callable[[], Mapping[PeerId, tuple[Lease, float]]]
"""Returns the live leases of others with their remaining life in seconds."""


def missing(state: FinalityState, leases: Leases = dict) -> str:
    """Who is missing so that no round becomes final, since when, and when the others go on; empty: nobody is.

    Where a quorum is here and four ballots decided nothing: whose answers were missing in them.
    Nobody is missed in a round that another member's lease calls final: this node has yet to read its records.
    """
    here = present_of(state, state.voters)
    is_short = not is_quorum(state.voters, here)
    if not state.live or state.deciding >= state.rounds or not (is_short or _is_still(state)):
        return ""
    if _is_behind(state, leases()):
        return ""
    if not is_short:
        return _unanswered(state)
    gone = [peer for peer in state.voters if peer not in here]
    # A lease outlives its member, so who is missing was heard last a lease before it counted as missing.
    since = state.quorum_since if state.short_since is None else state.short_since
    silent_s = state.now - since + state.lease_s
    # Who has not listened for so long has heard nobody that is missing, and knows not for how long they are away.
    here_s = state.now - state.live_since
    if here_s < LISTEN_S and not any(_why(state, peer) for peer in gone):
        return ""
    heard = f"silent for {silent_s:.0f} s" if silent_s <= here_s else f"not heard yet in {here_s:.0f} s"
    who = _listed([f"{_name(state, peer)} {_why(state, peer) or heard}" for peer in gone])
    lacks = f"round {state.deciding} lacks {len(gone)} of {len(state.voters)} voters: {who}"
    return f"{lacks}; {_next(state, leases)}"


def unsettled(state: FinalityState, leases: Leases = dict) -> str:
    """Whose vote a round lacks while a lease lives, or which rounds may be decided anew; else empty."""
    return _awaited(state, leases()) or _revocable(state)


def _awaited(state: FinalityState, lives: Mapping[PeerId, tuple[Lease, float]]) -> str:
    """Who of a quorum by leases is not heard any more, and until when it is waited for. After it: `missing`."""
    here = present_of(state, state.voters)
    late = [peer for peer in sorted(here & lives.keys()) if _is_unheard(state, peer, lives[peer][1])]
    is_short = is_quorum(state.voters, here) and not is_quorum(state.voters, here - {*late})
    if not state.live or state.deciding >= state.rounds or not is_short:
        return ""
    # What a member says that is gone brings no record of the round here.
    if _is_behind(state, {peer: lives[peer] for peer in lives.keys() - {*late}}):
        return ""
    ends_s = max(lives[peer][1] for peer in late) + SHORT_PATIENCES * state.patience_s
    left_s = max(ends_s, state.live_since + state.lease_s - state.now)
    ages_s = ((peer, state.lease_s - lives[peer][1]) for peer in late)
    who = _listed([f"{_name(state, peer)} (heard {age_s:.0f} s ago)" for peer, age_s in ages_s])
    return f"round {state.deciding} waits for the vote of {who}; the others go on without it in {left_s:.0f} s"


def _is_behind(state: FinalityState, lives: Mapping[PeerId, tuple[Lease, float]]) -> bool:
    """Whether a member's lease calls the round final: its records are on their way here."""
    # Anybody can hold a lease. A newcomer that has decided nothing yet knows no member.
    known = lives.keys() & state.accepted.union(state.voters) if state.deciding else lives.keys()
    return any(lives[peer][0].final >= state.deciding for peer in known)


def _is_unheard(state: FinalityState, peer: PeerId, left_s: float) -> bool:
    return peer in state.lost or left_s < OVERDUE * state.lease_s


def _revocable(state: FinalityState) -> str:
    """Since when our chain decides without most who decided before it: their chain would outrank ours."""
    book = state.epochs
    for before, segment in pairwise(state.chain):
        first, voters = segment.first, {*segment.electorate.voters}
        voters -= book.excluded_from(first) | state.equivocators
        side = book.on_side(segment.epoch, voters)
        others = sorted(one for one in voters - side if not book.has_left(one, first, before.epoch))
        if len(others) > len(side):
            who, (come, were) = _listed([_name(state, peer) for peer in others]), ("it comes", "was")
            if len(others) > 1:
                come, were = "they come", "were"
            back = f"{come} back after less than {away_s(state):.0f} s, or {were} only cut off"
            found = f"rounds since {first} were decided without {who}, and may be decided anew if {back}"
            return f"{found}; this node's work on them then returns to its error feedback"
    return ""


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_still(state: FinalityState) -> bool:
    return len(state.still.parts) >= STILL_BALLOTS


def _unanswered(state: FinalityState) -> str:
    """Whose answers were missing in the newest ballots of the round. Who was away missed none."""
    missed = {peer: sum(peer not in part for part in state.still.parts) for peer in state.voters}
    names = [f"{_name(state, peer)} missed {count}" for peer, count in missed.items() if count]
    more = [f"{len(names) - _SHOWN} more missed some"] if len(names) > _SHOWN else []
    who = ", ".join(names[:_SHOWN] + more) or "all took part in them"
    return f"round {state.deciding}: its {len(state.still.parts)} newest ballots decided nothing: {who}"


def _name(state: FinalityState, peer: PeerId) -> str:
    return "this node" if peer == state.me else f"…{peer[-6:]}"


def _why(state: FinalityState, peer: PeerId) -> str:
    """What is known of a voter that is missing; empty: that it is not heard."""
    if state.epochs.has_left(peer, state.deciding, state.epoch):
        return "left"
    if peer in state.epochs.excluded_from(state.deciding):
        return "is excluded"
    if peer in withheld(state, state.voters):
        return "keeps back its votes"
    if peer in state.members:
        return "is in another epoch"
    return ""


def _next(state: FinalityState, leases: Leases) -> str:
    """What ends it: the members that are here sign an epoch. Only some of them may (succession.py)."""
    left_s = wait_s(state)
    body = state.epochs.bodies.get(state.epochs.choice(state.me))
    if left_s > 0:
        return f"those that are here go on without them in {left_s:.0f} s"
    if body is not None and body.round == state.deciding:
        unsigned = sorted(set(body.members) - state.epochs.signers[state.epochs.choice(state.me)])
        if unsigned:
            names = ", ".join(f"…{peer[-6:]}" for peer in unsigned[:_SHOWN])
            return f"those that are here go on as soon as {names} signed too"
    _, signers = candidates_here(state)
    if not signers:
        return "nobody that is here may sign for going on; a member that works in a round may"
    if state.me not in signers:
        # By their leases they are here, and may be gone as well: then it is the turn of others.
        lives = leases()
        left = [lives[peer][1] if peer in lives else state.lease_s for peer in signers]
        left_s = max(*left, state.live_since + state.lease_s - state.now)
        names = ", ".join(f"…{peer[-6:]}" for peer in sorted(signers)[:_SHOWN])
        return f"{names} may go on without them now, others in {left_s:.0f} s if that does not happen"
    return "those that are here go on without them now"


def lost_work(
    state: FinalityState,
    lost: Container[int],
    members: Mapping[PeerId, MemberView],
    is_held: Callable[[Digest], bool],
    *,
    is_late: bool,
) -> str:
    """That nobody is here to end the oldest open round, and this node lost its own work; empty: it is not so.

    `lost`: the rounds of this node's contributions whose payloads are on no disk of it. Its feed holds one each.
    `is_held`: whether a contribution's payload is here. Empty also if the round has a Reduction, which may do.
    `is_late`: the round is open for so long that an author that is here, too, would have sent its own work.
    """
    book = state.book
    if state.deciding not in lost or book.reductions or any(map(is_held, book.contributions)):
        return ""
    if not state.live or state.now - state.live_since < LISTEN_S:
        return ""
    # An author that is here may send its work yet, and any other member that trains may train the round.
    others = [(peer, view.activity) for peer, view in members.items() if peer != state.me]
    authors = [peer for peer, _ in others if peer in book.contributors]
    if any(peer not in authors and activity != "observing" for peer, activity in others):
        return ""
    if authors and not is_late:
        return ""
    shown = ", ".join(_name(state, peer) for peer in sorted(authors)[:_SHOWN])
    lost_own = "this node lost its own work on it" + (f", and none came from {shown}" if authors else "")
    return (
        f"round {state.deciding} waits for others: {lost_own}; a node that comes back with its work, or that "
        "joins anew, goes on; if none does: `atoll checkpoint save`, and a new run from it"
    )


def no_model(state: RoundState, newest: int, applied: int, leases: Leases, still: Stillness) -> str:
    """That no member here offers the model of final round `newest`, or an older one that helps, to who lacks it.

    `applied`: the newest round in its Θ_final. `leases` is called for who lacks it only. Empty: it is not so, or
    payloads may come, or wait for a peer. A run's first fold ends after its round is final: who works has a model.
    """
    is_early = applied >= 0 and (state.phase is Phase.SYNC or still.still_s < LEAST_S)
    if state.phase not in FETCHES or newest < 0 or applied >= newest or is_early:
        return ""
    if any(lease.snapshot and (applied < 0 or lease.snapshot_round > applied) for lease, _ in leases().values()):
        return ""
    return f"waiting for the model of round {newest}: no member that is here offers it"


def absence(state: FinalityState, peer: PeerId) -> str:
    """`two histories`, `left` in good order or `gone`; empty for a peer that is no author of a final set."""
    if peer in state.equivocators:
        return "two histories"
    book, left = state.epochs, state.epochs.left.get(peer, -2)
    if left > -2 and book.voted.get(peer, -1) <= left + 1 and state.epoch not in book.back.get(peer, ()):
        return "left"
    return "gone" if peer in state.accepted else ""


def with_absences(rows: Iterable[PeerStatus], state: FinalityState) -> list[PeerStatus]:
    """The rows, where one of no member has the reason as its activity. No lease of two histories counts."""
    reasons = [(row, absence(state, PeerId(row.peer))) for row in rows]
    return [
        row if row.member and PeerId(row.peer) not in state.equivocators else replace(row, activity=reason)
        for row, reason in reasons
    ]
