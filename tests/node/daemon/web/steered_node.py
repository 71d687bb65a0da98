"""A node that a page may steer: it remembers its orders. Obeys `protocols.local.operator.Operator`."""

import itertools
from collections.abc import Sequence

from msgspec.structs import replace

from atoll.node.daemon.web.page_access import TOKEN_S, PageAccess
from atoll.node.daemon.web.page_control import PageControl
from atoll.node.daemon.web.site import Site
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import (
    EvaluationResult,
    LimitUse,
    PageToken,
    PeerStatus,
    RoundStatus,
    Status,
)
from tests.node.daemon.web.fed_node import Node

LIMITS = LimitUse(
    up_bytes_s=None, down_bytes_s=None, month_up_bytes=0, month_down_bytes=0, month_quota_bytes=None,
    month_ends="2026-12-01", stopped="",
)  # fmt: skip


class Steered:
    """`orders` has a line for each order; `site` is the node's page."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.orders: list[str] = []
        self.now_s = 1000.0
        made = itertools.count(1)
        self.access = PageAccess(lambda: self.now_s, lambda size: next(made).to_bytes(size, "big"))
        self.site = Site(node, control=PageControl(self.access, self))

    def status(self) -> Status:
        return self.node.status()

    async def peers(self) -> Sequence[PeerStatus]:
        return await self.node.peers()

    def rounds(self, last: int) -> Sequence[RoundStatus]:
        return self.node.rounds(last)

    async def stop(self, *, finish: bool) -> str:
        return self._order(f"stop {finish}")

    async def pause(self, reason: str, for_s: float | None) -> str:
        self.node.now = replace(self.node.now, activity="paused", reason=reason)
        return self._order(f"pause {reason} {for_s}")

    async def resume(self) -> str:
        self.node.now = replace(self.node.now, activity="training", reason="")
        return self._order("resume")

    async def limit(self, up: str | None, down: str | None) -> str:
        if up == "fast":
            raise ConfigError("limits: 'fast' cannot be read", hint="write it like 20mbit")
        self.node.now = replace(self.node.now, limits=replace(LIMITS, up_bytes_s=2.5e6 if up else None))
        return self._order(f"limit {up} {down}")

    def page_token(self) -> PageToken:
        return PageToken(self.access.issue(), TOKEN_S)

    async def exclude(self, peer: str, first: int | None, reason: str, since: int | None) -> str:
        return self._order(f"exclude {peer}")

    async def evaluate(self) -> EvaluationResult:
        self._order("eval")
        return EvaluationResult(1, 2.0, 3.0)

    def _order(self, order: str) -> str:
        self.orders.append(order)
        return f"done: {order}"
