"""What the web page's addresses answer: views of what the control socket says, and nothing else."""

from atoll.node.daemon.web import data
from atoll.node.daemon.web.metrics import Metrics
from atoll.node.daemon.web.page import page
from atoll.node.daemon.web.reply import HttpReply, refused
from atoll.node.daemon.web.request import HttpRequest


class Site:
    """Answers requests about one node."""

    def __init__(self, source: data.StatusSource) -> None:
        self._source, self._metrics = source, Metrics(source.status)

    async def answer(self, request: HttpRequest) -> HttpReply:
        """Raises what the source raises."""
        match request.path:
            case "/":
                return page()
            case "/metrics":
                return self._metrics.reply(request.accept)
            case "/v1/data.json":
                return await data.reply(self._source, request.query)
        return refused(404, "nothing here")
