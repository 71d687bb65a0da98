"""Who may steer the node by its page: tokens that work once, and sessions that are few and end."""

from atoll.node.daemon.web.page_access import (
    SESSION_S,
    SESSIONS_MAX,
    TOKEN_S,
    TOKENS_MAX,
    PageAccess,
)


class Clock:
    """A clock that the test sets, and bytes that differ each time."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.made = 0
        self.access = PageAccess(lambda: self.now_s, self.random_bytes)

    def random_bytes(self, size: int) -> bytes:
        self.made += 1
        return self.made.to_bytes(size, "big")


def test_a_token_begins_one_session():
    access = Clock().access
    token = access.issue()
    session = access.begin(token)
    assert session
    assert session != token
    assert access.is_session(session)
    assert not access.is_session(token)
    for other in ("", "x", session, token[:-1], "é"):
        assert access.begin(other) is None
    assert access.is_session(session)


def test_a_token_that_comes_twice_ends_what_it_began():
    access = Clock().access
    first, second = access.issue(), access.issue()
    stolen, other = access.begin(first), access.begin(second)
    assert access.begin(first) is None
    assert not access.is_session(stolen)
    assert access.is_session(other)


def test_an_unused_token_dies_of_age():
    clock = Clock()
    young, old = clock.access.issue(), clock.access.issue()
    clock.now_s += TOKEN_S
    assert clock.access.begin(young)
    clock.now_s += 0.1
    assert clock.access.begin(old) is None


def test_a_session_without_orders_ends():
    clock = Clock()
    session = clock.access.begin(clock.access.issue())
    for _ in range(3):
        clock.now_s += SESSION_S
        assert clock.access.is_session(session)
    clock.now_s += SESSION_S + 0.1
    assert not clock.access.is_session(session)
    clock.now_s -= SESSION_S
    assert not clock.access.is_session(session), "it does not come back"


def test_tokens_and_sessions_are_few():
    access = Clock().access
    tokens = [access.issue() for _ in range(TOKENS_MAX + 1)]
    assert access.begin(tokens[0]) is None
    sessions = [access.begin(token) for token in tokens[1 : SESSIONS_MAX + 2]]
    assert all(sessions)
    assert [access.is_session(session) for session in sessions] == [False, *[True] * SESSIONS_MAX]
    assert (len(access._tokens), len(access._sessions)) == (TOKENS_MAX, SESSIONS_MAX)


def test_only_hashes_are_kept():
    access = Clock().access
    token = access.issue()
    session = access.begin(token)
    kept = repr(vars(access))
    assert token not in kept
    assert session not in kept


def test_a_page_that_loopback_does_not_reach_has_no_token():
    assert PageAccess(lambda: 0.0, bytes, is_open=False).issue() == ""
