"""Answers of the web page as bytes, with the header fields that keep other pages away. Pure."""

from dataclasses import dataclass
from http import HTTPStatus

NOTHING = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of what is no page: it may load and run nothing."""

_FIXED = (
    "Connection: close\r\n"
    "Cache-Control: no-store\r\n"
    "Cross-Origin-Resource-Policy: same-origin\r\n"
    "Referrer-Policy: no-referrer\r\n"
    "X-Content-Type-Options: nosniff\r\n"
)
"""No CORS field: a script of another origin gets no answer to read."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """One answer."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: int = 200
    policy: str = NOTHING


def refused(status: int, text: str) -> HttpReply:
    """An answer that says why not."""
    return HttpReply(f"{text}\n".encode(), status=status)


def encoded(reply: HttpReply) -> bytes:
    """Status line, header fields, body."""
    allow = "Allow: GET\r\n" if reply.status == HTTPStatus.METHOD_NOT_ALLOWED else ""
    head = (
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}\r\n"
        f"Content-Type: {reply.kind}\r\nContent-Length: {len(reply.body)}\r\n"
        f"Content-Security-Policy: {reply.policy}\r\n{allow}{_FIXED}\r\n"
    )
    return head.encode("ascii") + reply.body
