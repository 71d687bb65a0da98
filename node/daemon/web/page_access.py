"""Who may steer the node by its page: one-time tokens, and the sessions that they were exchanged for. Pure.

A token is made for whoever may use the control socket, so the node's own user. It travels in the fragment of the
page's address, which no browser sends anywhere. The page exchanges it for a session, which lives in that page's
memory only: a cookie would be sent with requests of other pages too.
"""

import base64
import hashlib
import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable

TOKEN_S = 600.0
"""A token that nobody used dies after so long."""
TOKENS_MAX = 8
"""Tokens that are remembered, used ones too; the oldest one goes when there is one more."""
SESSION_S = 8 * 3600.0
"""A session without an order for so long ends."""
SESSIONS_MAX = 4
"""Sessions at a time; the one that was silent for longest ends when there is one more."""
SECRET_BYTES = 24


class PageAccess:
    """Issues tokens and knows sessions. Of each secret only its hash is kept."""

    def __init__(
        self, now: Callable[[], float], random_bytes: Callable[[int], bytes], *, is_open: bool = True
    ) -> None:
        """`now`: a clock in seconds that never goes back. With `is_open` false no token is ever issued."""
        self._now = now
        self._random_bytes = random_bytes
        self._is_open = is_open
        self._tokens: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        """By hash: when it was issued, and the hash of the session that it began; empty: it is unused."""
        self._sessions: OrderedDict[bytes, float] = OrderedDict()
        """By hash: when the last order came."""

    def issue(self) -> str:
        """A new token, or an empty text where the page cannot be steered."""
        if not self._is_open:
            return ""
        token, key = self._secret()
        self._tokens[key] = self._now(), b""
        _keep_newest(self._tokens, TOKENS_MAX)
        return token

    def begin(self, token: str) -> str | None:
        """The session that a token begins; None if the token is unknown, used or too old.

        A token that comes twice was in two hands, and nobody knows whose was first: its session ends too.
        """
        key = _find(token, self._tokens)
        if key is None:
            return None
        issued_s, used_by = self._tokens[key]
        if used_by:
            self._sessions.pop(used_by, None)
            return None
        if self._now() - issued_s > TOKEN_S:
            del self._tokens[key]
            return None
        session, session_key = self._secret()
        self._tokens[key] = issued_s, session_key
        self._sessions[session_key] = self._now()
        _keep_newest(self._sessions, SESSIONS_MAX)
        return session

    def is_session(self, secret: str) -> bool:
        """Whether an order with this secret is carried out; it prolongs the session."""
        key = _find(secret, self._sessions)
        if key is None:
            return False
        last_s = self._sessions.pop(key)
        if self._now() - last_s > SESSION_S:
            return False
        self._sessions[key] = self._now()
        return True

    def _secret(self) -> tuple[str, bytes]:
        """A new secret and its hash."""
        secret = base64.urlsafe_b64encode(self._random_bytes(SECRET_BYTES)).decode()
        return secret, _hash(secret)


def _hash(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _find(secret: str, keys: Iterable[bytes]) -> bytes | None:
    """The key that belongs to a secret, in the same time wherever it is."""
    wanted, found = _hash(secret), None
    for key in keys:
        if hmac.compare_digest(key, wanted):
            found = key
    return found


def _keep_newest(table: "OrderedDict[bytes, tuple[float, bytes]] | OrderedDict[bytes, float]", most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
