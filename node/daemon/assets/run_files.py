"""What a round needs beside the model: moments that its run begins with, and shards of its text."""

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from atoll.node.daemon.assets.moments import fetch_moments
from atoll.node.daemon.assets.run_text import Report, RunText
from atoll.node.daemon.core.interfaces import Network, RunContext
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.ids import Round
from atoll.protocols.run.moments import files_for


@dataclass(kw_only=True, slots=True, frozen=True)
class RoundFiles:
    """Fetches what one round needs. Implements `RoundAssets`."""

    context: RunContext
    net: Network
    text: RunText
    start_task: Callable[[Coroutine[Any, Any, None], str], None]

    async def prepare(self, turn: Turn, experts: Iterable[int], report: Report) -> bool:
        """Return when a member's turn can begin; whether it had to wait. Its lease goes on meanwhile."""
        waited = turn.round == 0
        if waited:
            files = files_for(self.context.spec.model, experts)
            await fetch_moments(self.context.spec, files, self.net, report, has_begun=lambda: False)
        if self.context.spec.data.index is None:
            return waited
        waited |= await self.text.prepare(turn, report)
        number = turn.round + 1
        if number < self.context.spec.outer.rounds:
            self.start_task(self._fetch_ahead(turn._replace(round=Round(number))), f"shards {number}")
        return waited

    async def _fetch_ahead(self, turn: Turn) -> None:
        """Fetch the shards of the next round while this one is trained."""
        await self.text.prepare(turn, lambda reason: None)
