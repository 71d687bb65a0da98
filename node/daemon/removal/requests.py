"""What the user of a node may ask for about other members, and the lines that tell of it. Pure."""

from collections import Counter

from atoll.node.daemon.consensus.chains.epochs import MAX_VOTES
from atoll.node.daemon.consensus.excision import corrections, wanted
from atoll.node.daemon.consensus.exclusion import needed_votes
from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, Round, short
from atoll.protocols.ledger.records import Excised
from atoll.protocols.local.standing import Exclusion, VotesAgainst

SHOWN = 64
"""Most members that are shown with the votes against them."""


def reason_of(one: Exclusion, me: PeerId) -> str:
    """One line on an exclusion, for the node `me` or for its peer."""
    who, why = "this node" if one.peer == me else short(one.peer), f": {one.reason}" if one.reason else ""
    by = "the run's owner" if one.by == "owner" else "two thirds of the voters"
    return f"{by} excluded {who} from round {one.round} on{why}"


def votes_against(state: FinalityState) -> tuple[VotesAgainst, ...]:
    """The members that some voters of the round that is decided next, or this node, want to exclude."""
    cast, gone = state.epochs.votes_against, state.epochs.excluded_from(state.deciding)
    counted = [voter for voter in state.voters if voter not in state.equivocators]
    votes = Counter(
        peer for voter in counted for peer, first in cast.get(voter, {}).items() if first <= state.deciding
    )
    own, needed = cast.get(state.me, {}), needed_votes(state, state.voters)
    shown = sorted({*votes, *own} - gone, key=lambda peer: (peer not in own, -votes[peer], peer))[:SHOWN]
    return tuple(VotesAgainst(peer=peer, votes=votes[peer], needed=needed, by_us=peer in own) for peer in shown)


def vote_line(state: FinalityState, peer: PeerId) -> str:
    """What the vote of this node against `peer` amounts to, in one line."""
    cast = state.epochs.votes_against
    # The vote may still be on its way to this machine.
    counted = [voter for voter in state.voters if voter not in state.equivocators]
    votes = sum(voter == state.me or peer in cast.get(voter, ()) for voter in counted)
    needed = needed_votes(state, state.voters)
    said = f"this node voted to exclude {peer}: {votes} of the {needed} votes that exclude it"
    return said if state.me in state.voters else f"{said}; this node is no voter now, its vote counts once it is"


def first_excised(state: FinalityState, peer: PeerId, wished: int) -> Round:
    """The first round that the work of `peer` can be taken out of, from `wished` on. Raises ConfigError."""
    if not state.excise_rounds:
        raise ConfigError(
            "no node of this run keeps the payloads of final rounds, so no work can be taken out of them",
            hint="pace.excise_rounds is set when a run is made; without --excise the member is excluded",
        )
    since = Round(max(wished, min(state.window, default=state.deciding)))
    if not corrections(state, (Excised(peer, since),)):
        raise ConfigError(
            f"{peer} has no work in the rounds {since} to {state.last_final}; older ones cannot be corrected",
            hint="without --excise it is excluded",
        )
    return since


def first_excluded(state: FinalityState, peer: PeerId, first: Round | None) -> Round:
    """The round from which this node may exclude `peer`; `first`: the user's wish. Raises ConfigError."""
    if peer == state.me:
        raise ConfigError("a node cannot exclude itself", hint="stop it instead: atoll stop")
    if peer == state.epochs.owner:
        raise ConfigError("the run's owner cannot be excluded", hint="docs/removal.md says why")
    # What voters signed cannot be signed again, and no node keeps the payloads of all rounds to fold them anew.
    if first is not None and not state.deciding <= first < state.rounds:
        raise ConfigError(
            f"round {first} is final, or not of this run; final rounds keep the member's work",
            hint=f"exclude from round {state.deciding} on; docs/removal.md says how a run begins again without it",
        )
    cast = state.epochs.votes_against.get(state.me, {})
    if len(cast) >= MAX_VOTES and peer not in cast:
        raise ConfigError(
            f"this node voted to exclude {MAX_VOTES} members", hint="no more of its votes count; others may vote"
        )
    return state.deciding if first is None else first


def since_of(state: FinalityState, peer: PeerId) -> int | None:
    """The first round that a member's work is, or was, taken out of; None: nobody wants that."""
    since = state.excised[peer].since if peer in state.excised else wanted(state).get(peer)
    return since if since is None or peer in state.excised else max(since, state.deciding - state.excise_rounds)
