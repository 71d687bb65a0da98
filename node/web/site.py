"""What the web page's addresses answer: views of what the control socket says, and nothing else."""

from typing import Protocol

from atoll.node.web.metrics import Metrics
from atoll.node.web.reply import Reply, refused
from atoll.node.web.request import Request
from atoll.protocols import control as c


class Source(Protocol):
    """The node, to look at."""

    def status(self) -> c.Status:
        """The node now."""


class Site:
    """Answers requests about one node."""

    def __init__(self, source: Source) -> None:
        self._metrics = Metrics(source.status)

    async def answer(self, request: Request) -> Reply:
        """Raises what the source raises."""
        match request.path:
            case "/metrics":
                return self._metrics.reply(request.accept)
        return refused(404, "nothing here")
