"""What people read about exclusions, and which ones the run's owner may write. Pure."""

from atoll.node.daemon.consensus.types import FinalityState
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import PeerId, Round, short
from atoll.protocols.ledger.records import Exclude


def reason_of(body: Exclude, me: PeerId) -> str:
    """One line on an exclusion, for the node `me` or for its peer."""
    who, why = "this node" if body.peer == me else short(body.peer), f": {body.reason}" if body.reason else ""
    return f"the run's owner excluded {who} from round {body.round} on{why}"


def first_excluded(state: FinalityState, owner: PeerId, peer: PeerId, first: Round | None) -> Round:
    """The round from which this node may exclude `peer`; `first`: the user's wish. Raises ConfigError."""
    if owner != state.me:
        raise ConfigError("only the run's owner can exclude a member", hint=f"its identity is {owner}")
    if peer == owner:
        raise ConfigError("the owner cannot exclude itself", hint="stop the node instead: atoll stop")
    # What voters signed cannot be signed again, and no node keeps the payloads of all rounds to fold them anew.
    if first is not None and not state.deciding <= first < state.rounds:
        raise ConfigError(
            f"round {first} is final, or not of this run; final rounds keep the member's work",
            hint=f"exclude from round {state.deciding} on; docs/removal.md says how a run begins again without it",
        )
    return state.deciding if first is None else first
