"""Orders from the page: which requests may change something, and what they may change.

A browser runs pages of strangers beside ours, and they can make it send requests here. So an order needs, each by
itself: a peer on loopback, a loopback `Host` (else DNS rebinding), the page's own `Origin` (else a form or script
of another page), and the secret of a session, in a header field that no form can set.
"""

import ipaddress
import logging

import msgspec

from atoll.node.daemon.web.http_messages import ORDER, SESSION, HttpRefusal, HttpReply, HttpRequest
from atoll.node.daemon.web.page_access import PageAccess
from atoll.protocols.errors import AtollError, ConfigError
from atoll.protocols.local.control_lines import decode_ask, encode_answer, refusal
from atoll.protocols.local.control_messages import Answer, Ask, PauseNode, ResumeNode, SetLimits
from atoll.protocols.local.operator import Operator, answer_ask

log = logging.getLogger(__name__)

ORDERS = (PauseNode, ResumeNode, SetLimits)
"""What a page may ask for: nothing that ends the node or speaks for it in the run."""


class PageControl:
    """Answers the POST requests about one node."""

    def __init__(self, access: PageAccess, operator: Operator) -> None:
        self._access = access
        self._operator = operator

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to a POST. Raises nothing of the operator's: the page shows its line."""
        if why := foreign(request):
            return HttpRefusal(403, why).reply()
        if request.path == SESSION:
            return self._begin(request.bearer)
        if request.path != ORDER:
            return HttpRefusal(404, "nothing here").reply()
        if not self._access.is_session(request.bearer):
            return HttpRefusal(401, "this page may not steer the node: use `atoll web`").reply()
        try:
            answer = await self._carry_out(decode_ask(request.body))
        except AtollError as error:
            answer = refusal(error)
        return HttpReply(encode_answer(answer), "application/json")

    def _begin(self, token: str) -> HttpReply:
        session = self._access.begin(token)
        if session is None:
            log.warning("a page asked to steer this node with a token that was used or is too old")
            return HttpRefusal(403, "this address was used or is too old: `atoll web` gives another").reply()
        log.info("a page may steer this node now: it came by an address of `atoll web` or `start --open`")
        return HttpReply(msgspec.json.encode({"session": session}), "application/json")

    async def _carry_out(self, ask: Ask) -> Answer:
        if not isinstance(ask, ORDERS):
            raise ConfigError("the page cannot order this", hint="use the command")
        log.info("the page orders: %s", ask)
        return await answer_ask(self._operator, ask)


def foreign(request: HttpRequest) -> str:
    """Why a request may not change anything; empty if it comes from this machine and from our own page."""
    if not request.is_from_loopback:
        return "only a browser on this machine may steer the node"
    if not is_loopback_host(request.host):
        return "ask by localhost or a loopback address to steer the node"
    if request.origin.lower() != f"http://{request.host.lower()}":
        return "only the node's own page may steer it"
    return ""


def is_loopback_host(host: str) -> bool:
    """Whether a Host field, which is `localhost` or an IP address, means this machine's loopback."""
    bare = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return bare.lower() == "localhost" or ipaddress.ip_address(bare).is_loopback
