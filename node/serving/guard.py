"""Who may ask: programs of this machine, and pages that this machine serves.

A server on loopback is reached by every page that the machine's browser shows: by a name of the page's site that
points to 127.0.0.1 (DNS rebinding), or by a request across sites. The first has another Host, the second an
Origin.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.node.serving.replies import error_of

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def refusal(host: str, origin: str | None) -> str | None:
    """Why a request with these headers is not answered; None if it is."""
    if _name(f"//{host}") not in LOOPBACK:
        return f"this server is asked as localhost or 127.0.0.1, not as {host[:100]!r}"
    if origin is not None and _name(origin) not in LOOPBACK:
        return f"pages of {origin[:100]!r} may not ask this server"
    return None


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None


class LoopbackOnly:
    """Answers 403 to what `refusal` refuses."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            why = refusal(headers.get("host", ""), headers.get("origin"))
            if why is not None:
                await JSONResponse(error_of(why, "permission_error"), 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)
