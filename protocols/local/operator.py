"""What the daemon offers its user, by the control socket and by the web page, and which answer each ask gets."""

from collections.abc import Sequence
from typing import Protocol

from atoll.protocols.errors import DecodeError
from atoll.protocols.local import control_messages
from atoll.protocols.local.control_messages import CommandDone


class Operator(Protocol):
    """The reports and orders that the daemon offers. A method may raise AtollError: the user sees its line."""

    def status(self) -> control_messages.Status:
        """The node's status now."""

    async def peers(self) -> Sequence[control_messages.PeerStatus]:
        """A row for each known peer."""

    def rounds(self, last: int) -> Sequence[control_messages.RoundStatus]:
        """Rows of the newest `last` rounds, oldest first."""

    async def stop(self, *, finish: bool) -> str:
        """Begin to stop; return at once with a line for the user."""

    async def pause(self, reason: str, for_s: float | None) -> str:
        """Start no further round, for so many seconds or until `resume`; return a line for the user."""

    async def resume(self) -> str:
        """Go on after a pause; return a line for the user."""

    async def limit(self, up: str | None, down: str | None) -> str:
        """Change the rates of traffic until the node ends; return a line for the user. See `SetLimits`."""

    def page_token(self) -> control_messages.PageToken:
        """A token with which a browser may steer this node once it has the page."""

    async def exclude(self, peer: str, first: int | None, reason: str, since: int | None) -> str:
        """Exclude a member from the run; return a line for the user."""

    async def evaluate(self) -> control_messages.EvaluationResult:
        """Validation loss of the current weights."""


async def answer_ask(operator: Operator, ask: control_messages.Ask) -> control_messages.Answer:
    """The answer to an ask that has one. Raises what the operator raises, and DecodeError for a stream's ask."""
    match ask:
        case control_messages.GetStatus():
            return operator.status()
        case control_messages.GetPeers():
            return control_messages.PeerList(tuple(await operator.peers()))
        case control_messages.GetRounds():
            return control_messages.RoundList(tuple(operator.rounds(ask.last)))
        case control_messages.GetPageToken():
            return operator.page_token()
        case control_messages.StopNode():
            return CommandDone(await operator.stop(finish=ask.finish))
        case control_messages.PauseNode():
            return CommandDone(await operator.pause(ask.reason, ask.for_s))
        case control_messages.ResumeNode():
            return CommandDone(await operator.resume())
        case control_messages.SetLimits():
            return CommandDone(await operator.limit(ask.up, ask.down))
        case control_messages.ExcludePeer():
            return CommandDone(await operator.exclude(ask.peer, ask.first, ask.reason, ask.since))
        case control_messages.EvaluateModel():
            return await operator.evaluate()
    raise DecodeError(f"{type(ask).__name__} is not served")
