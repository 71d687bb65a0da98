"""HTTP requests and replies of the web page: bytes to a request or a refusal, a reply to bytes. Pure.

h11 reads the header fields. The page accepts less than h11 does: a GET without a body, or a POST with a short one
to one of two paths, by the machine's address, one request a connection.
"""

import ipaddress
import re
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl

import h11

HEAD_MAX_BYTES = 8192
"""Most bytes of the request line and the header fields together."""
FIELDS_MAX = 64
QUERY_FIELDS_MAX = 8
BODY_MAX_BYTES = 1024
SESSION, ORDER = "/v1/session", "/v1/order"
"""Where a POST goes: to begin a session, and to give an order in one."""
END = b"\r\n\r\n"
NOTHING_ALLOWED = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of a reply that is not the page: it may load and run nothing."""

# h11 also takes bare line feeds, folded fields, other versions and absolute targets. Two readers that disagree on
# where a field ends let requests be smuggled, so the head must have the one form that browsers send.
_HEAD = re.compile(rb"[A-Z]{1,16} /[!-~]{0,1023} HTTP/1\.[01](?:\r\n[^\s][^\r\n]*)*\r\n\r\n")
_HOST_FIELD = re.compile(rb"\r\nhost:", re.IGNORECASE)
_HOST = re.compile(r"(?:\[([^\]]+)\]|([^:]+))(?::[0-9]{0,5})?")
_FIXED_FIELDS = (
    "Connection: close\r\n"
    "Cache-Control: no-store\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
)
"""Fields of every reply. There is no CORS field, so a script of another origin cannot read a reply."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request that may be answered."""

    path: str
    query: dict[str, str]
    accept: str
    """Value of the Accept field; several are joined by commas."""
    is_post: bool = False
    """A POST to SESSION or ORDER; else a GET. Its other fields are empty in a GET."""
    host: str = ""
    origin: str = ""
    """Value of the only Origin field; empty for none or several."""
    bearer: str = field(default="", repr=False)
    """Secret in the only Authorization field."""
    body_bytes: int = 0
    """Length of the body that follows."""
    body: bytes = b""
    is_from_loopback: bool = False
    """Whether a program on this machine sent it. The server knows."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Status, body and varying header fields of one reply."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    policy: str = NOTHING_ALLOWED
    """Content-Security-Policy."""


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """Why a request is refused: an HTTP status and a line for people."""

    status: int
    text: str

    def reply(self) -> HttpReply:
        """The reply that says so."""
        return HttpReply(f"{self.text}\n".encode(), status=self.status)


_WRONG_HOST = HttpRefusal(403, "ask for this page by an address or as localhost, not by another name")


def parse(head: bytes) -> HttpRequest | HttpRefusal:
    """Parse a request line and its header fields, the empty line after them included. Never raises."""
    if not _HEAD.fullmatch(head):
        return HttpRefusal(400, "not a request head")
    connection = h11.Connection(h11.SERVER)
    try:
        connection.receive_data(head)
        request = connection.next_event()
    except h11.RemoteProtocolError as error:
        # h11 also asks for exactly one Host field, but this page refuses a wrong one with 403.
        return HttpRefusal(400, str(error)) if len(_HOST_FIELD.findall(head)) == 1 else _WRONG_HOST
    assert isinstance(request, h11.Request), "h11 has a whole head"
    return _refusal_of(request) or _read_target(request)


def is_address(host: str) -> bool:
    """Whether a Host field is `localhost` or an IP address, with or without a port.

    A page of another site whose name is made to lead here (DNS rebinding) has its name in this field.
    """
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    try:
        if found[1]:
            ipaddress.IPv6Address(found[1])
        elif found[2].lower() != "localhost":
            ipaddress.IPv4Address(found[2])
    except ValueError:
        return False
    return True


def encode(reply: HttpReply) -> bytes:
    """Status line, header fields and body."""
    allow = "Allow: GET\r\n" if reply.status == HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\n"
        f"Content-Type: {reply.content_type}\r\nContent-Length: {len(reply.body)}\r\n"
        f"Content-Security-Policy: {reply.policy}\r\n{allow}{_FIXED_FIELDS}\r\n"
    )
    return head.encode("ascii") + reply.body


def _values(request: h11.Request, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in request.headers if key == name]


def _refusal_of(request: h11.Request) -> HttpRefusal | None:
    is_post = request.method == b"POST" and request.target.decode("ascii") in (SESSION, ORDER)
    if request.method != b"GET" and not is_post:
        return HttpRefusal(405, "only GET")
    if len(list(request.headers)) > FIELDS_MAX:
        return HttpRefusal(431, f"more than {FIELDS_MAX} header fields")
    hosts = _values(request, b"host")
    if len(hosts) != 1 or not is_address(hosts[0]):
        return _WRONG_HOST
    lengths = _values(request, b"content-length")
    if _values(request, b"transfer-encoding") or (lengths not in ([], ["0"]) and not is_post):
        return HttpRefusal(400, "a GET has no body, and a POST says how long it is")
    if is_post and len(lengths) != 1:
        return HttpRefusal(411, "say how long the body is")
    if is_post and int(lengths[0]) > BODY_MAX_BYTES:
        return HttpRefusal(413, f"more than {BODY_MAX_BYTES} bytes")
    return None


def _read_target(request: h11.Request) -> HttpRequest | HttpRefusal:
    path, _, query = request.target.decode("ascii").partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX)
    except ValueError:
        return HttpRefusal(400, "too many fields in the query")
    accept = ",".join(_values(request, b"accept"))
    if request.method == b"GET":
        return HttpRequest(path, dict(pairs), accept)
    return HttpRequest(
        path,
        {},
        accept,
        is_post=True,
        host=_values(request, b"host")[0],
        origin=_only(request, b"origin"),
        bearer=_only(request, b"authorization").removeprefix("Bearer "),
        body_bytes=int(_values(request, b"content-length")[0]),
    )


def _only(request: h11.Request, name: bytes) -> str:
    values = _values(request, name)
    return values[0] if len(values) == 1 else ""
