"""Requests of the web page's readers: bytes to a question, or to a refusal. Pure.

As little HTTP/1.1 (RFC 9112) as browsers and scrapers need: GET, no body, one request a connection.
"""

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

HEAD_MAX_BYTES = 8192
"""Request line and header fields together."""
FIELDS_MAX = 64
END = b"\r\n\r\n"

_LINE = re.compile(r"([A-Z]{1,16}) (/[!-~]{0,1023}) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_HOST = re.compile(r"(?:\[([^\]]+)\]|([^:]+))(?::[0-9]{0,5})?")


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A GET that may be answered."""

    path: str
    query: dict[str, str]
    accept: str
    """The header field, as it came."""


@dataclass(frozen=True, slots=True)
class HttpRefusal:
    """Why not, for people."""

    status: int
    text: str


def parse(head: bytes) -> HttpRequest | HttpRefusal:
    """`head`: request line and header fields, with or without the empty line after them."""
    line, *fields = head.removesuffix(END).decode("latin-1").split("\r\n")
    asked = _LINE.fullmatch(line)
    if asked is None:
        return HttpRefusal(400, "not a request line")
    if asked[1] != "GET":
        return HttpRefusal(405, "only GET")
    found = _fields(fields)
    if isinstance(found, HttpRefusal):
        return found
    hosts = found.get("host", [])
    if len(hosts) != 1 or not is_address(hosts[0]):
        return HttpRefusal(403, "ask for this page by an address or as localhost, not by another name")
    if "transfer-encoding" in found or found.get("content-length", ["0"]) != ["0"]:
        return HttpRefusal(400, "a GET has no body")
    return _target(asked[2], ",".join(found.get("accept", [])))


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


def _fields(lines: list[str]) -> dict[str, list[str]] | HttpRefusal:
    """Values by lower-case name, in order."""
    if len(lines) > FIELDS_MAX:
        return HttpRefusal(431, f"more than {FIELDS_MAX} header fields")
    found: dict[str, list[str]] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            return HttpRefusal(400, "not a header field")
        found.setdefault(field[1].lower(), []).append(field[2].rstrip(" \t"))
    return found


def _target(target: str, accept: str) -> HttpRequest | HttpRefusal:
    path, _, query = target.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=8)
    except ValueError:
        return HttpRefusal(400, "too many words in the query")
    return HttpRequest(path, dict(pairs), accept)
