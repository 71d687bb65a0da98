"""What is a request and what is not, byte by byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.daemon.web.http_messages import HttpRefusal, HttpRequest, is_address, parse
from atoll.node.daemon.web.server import ListenAddress, is_loopback, parse_listen_address
from atoll.protocols.errors import ConfigError


def head(line: str = "GET / HTTP/1.1", *fields: str, host: str = "127.0.0.1:4780") -> bytes:
    return "\r\n".join((line, f"Host: {host}", *fields, "", "")).encode("latin-1")


def test_a_get_with_words():
    asked = parse(head("GET /v1/data.json?since=7&x= HTTP/1.1", "Accept: text/html", "accept: */*"))
    assert asked == HttpRequest("/v1/data.json", {"since": "7", "x": ""}, "text/html,*/*")


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (b"", 400),
        (b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: localhost\n\n", 400),
        (b"get / HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (head("GET  / HTTP/1.1"), 400),
        (head("GET http://127.0.0.1/ HTTP/1.1"), 400),
        (head("GET /" + "a" * 1024 + " HTTP/1.1"), 400),
        (head("GET /?" + "&a=1" * 9 + " HTTP/1.1"), 400),
        (head("POST / HTTP/1.1"), 405),
        (head("HEAD / HTTP/1.1"), 405),
        (head("GET / HTTP/1.1", "Content-Length: 1"), 400),
        (head("GET / HTTP/1.1", "Content-Length: 0", "Content-Length: 5"), 400),
        (head("GET / HTTP/1.1", "Transfer-Encoding: chunked"), 400),
        (head("GET / HTTP/1.1", " folded: line"), 400),
        (head("GET / HTTP/1.1", "no colon"), 400),
        (head("GET / HTTP/1.1", "A\x00: b"), 400),
        (head("GET / HTTP/1.1", "Space : b"), 400),
        (head("GET / HTTP/1.1", *(f"a{number}: b" for number in range(64))), 431),
        (b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n", 403),
        (head("GET / HTTP/1.1", "Host: 127.0.0.1"), 403),
    ],
)
def test_what_is_refused(given, status):
    refusal = parse(given)
    assert isinstance(refusal, HttpRefusal)
    assert refusal.status == status


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:4780",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:80",
        "[::1]",
        "[::1]:4780",
        "10.1.2.3:1",
    ],
)
def test_hosts_that_are_addresses(host):
    assert is_address(host)


@pytest.mark.parametrize(
    "host",
    [
        "", "evil.example", "localhost.evil.example", "evil.localhost", "127.0.0.1.evil.example", "localhost.",
        "127.0.0.1@evil.example", "127.1", "0x7f000001", "2130706433", "::1", "[::1", "[127.0.0.1]", "[localhost]",
        "127.0.0.1:x", "127.0.0.1:123456", "127.0.0.1:80:80", "[::1]x", "127.0.0.1 ", "evil.example:4780",
    ],
)  # fmt: skip
def test_hosts_that_are_names(host):
    assert not is_address(host)
    assert isinstance(parse(head(host=host)), HttpRefusal) or host == "127.0.0.1 ", (
        "outer blanks are no part of a field"
    )


@given(st.binary(max_size=300))
def test_no_bytes_raise(data):
    assert isinstance(parse(data), HttpRequest | HttpRefusal)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=80))
def test_no_target_raises(text):
    asked = parse(head(f"GET /{text} HTTP/1.1"))
    assert isinstance(asked, HttpRefusal) or (" " not in text and asked.path.startswith("/"))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", None),
        ("127.0.0.1:0", ListenAddress("127.0.0.1", 0)),
        ("0.0.0.0:4780", ListenAddress("0.0.0.0", 4780)),
        ("[::1]:4780", ListenAddress("::1", 4780)),
    ],
)
def test_places(text, place):
    assert parse_listen_address(text) == place
    assert text == (str(place) if place else "")


@pytest.mark.parametrize("text", ["localhost:4780", "LOCALHOST:4780"])
def test_localhost_is_this_machine_without_a_lookup(text):
    assert parse_listen_address(text) == ListenAddress("127.0.0.1", 4780)


@pytest.mark.parametrize(
    ("text", "is_it"),
    [("", True), ("localhost:0", True), ("[::1]:1", True), ("127.9.9.9:1", True), ("0.0.0.0:1", False)],
)
def test_loopback(text, is_it):
    assert is_loopback(text) is is_it


@pytest.mark.parametrize(
    "text",
    [
        "4780",
        ":4780",
        "node.example:4780",
        "::1:4780",
        "[127.0.0.1]:1",
        "127.0.0.1",
        "127.0.0.1:65536",
        "1.2.3.4:-1",
    ],
)
def test_places_that_are_none(text):
    with pytest.raises(ConfigError, match=r"^web: "):
        parse_listen_address(text)
