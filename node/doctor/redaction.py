"""Takes out of a report what must not leave the machine: keys, invites, addresses, names. Pure.

Two ways together: what is known to be secret here is replaced wherever it stands, and what looks like a secret or
an address is replaced by its form. Digests and PeerIDs are cut or renamed: they lead to a run and to its members.
"""

import base64
import ipaddress
import re
from collections.abc import Iterable, Mapping

import base58

SECRET, ADDRESS, INVITE = "<secret>", "<address>", "<invite>"
SHOWN = 8
"""Characters of a digest that stay: as many as the tables of `atoll` show."""
SHORTEST_NAME = 3
_INVITE = re.compile(r"atoll:[a-z2-7]{16,}", re.IGNORECASE)
_HOST_PART = re.compile(r"(/(?:ip4|ip6|dns|dns4|dns6|dnsaddr)/)[^/\s\"',;)\]}]+")
_IP4 = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_IP6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?:%\w+)?(?![\w:])", re.IGNORECASE)
_MAC = re.compile(r"\b(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}\b", re.IGNORECASE)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_LOGIN = re.compile(r"(\w+://)[^/\s@\"']+@")
_NAMED = re.compile(
    r"(?i)((?:token|password|passwd|secret|api[_-]?key|private[_-]?key|authorization|cookie)[\"']?\s*[:=]\s*)"
    r"(?:bearer\s+)?(\"[^\"]*\"|'[^']*'|[^\s\"',}]+)"
)
_PEER = re.compile(r"\b(?:12D3KooW[1-9A-HJ-NP-Za-km-z]{44}|Qm[1-9A-HJ-NP-Za-km-z]{44})\b")
_HEX = re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE)
_LONG = re.compile(r"[A-Za-z0-9+/_-]{40,}={0,2}")


class Redaction:
    """Redacts the texts of one report: a PeerID has the same new name in all of them."""

    def __init__(self, secrets: Iterable[str], names: Mapping[str, str]) -> None:
        """`secrets` are replaced by SECRET; `names`: what else is replaced, and by what."""
        known = {text: SECRET for text in secrets if text} | {
            text: other for text, other in names.items() if len(text) >= SHORTEST_NAME
        }
        self._known = sorted(known.items(), key=lambda pair: -len(pair[0]))
        self._peers: dict[str, str] = {}

    def text(self, text: str) -> str:
        """The text without what must not leave the machine."""
        for known, other in self._known:
            # A name inside of a longer word is another word; a secret is one anywhere.
            form = re.escape(known) if other == SECRET else rf"(?<![\w.-]){re.escape(known)}(?![\w-])"
            text = re.sub(form, other.replace("\\", r"\\"), text)
        text = _INVITE.sub(INVITE, text)
        text = _LOGIN.sub(rf"\1{SECRET}@", text)
        text = _NAMED.sub(rf"\1{SECRET}", text)
        text = _PEER.sub(lambda found: self._peers.setdefault(found[0], f"peer-{len(self._peers) + 1}"), text)
        text = _HOST_PART.sub(lambda found: found[1] + _place(found[0].removeprefix(found[1])), text)
        text = _MAC.sub(ADDRESS, text)
        text = _MAIL.sub(ADDRESS, text)
        text = _IP4.sub(lambda found: _place(found[0]), text)
        text = _IP6.sub(lambda found: _place(found[0]), text)
        text = _HEX.sub(lambda found: f"{found[0][:SHOWN]}…", text)
        return _LONG.sub(lambda found: found[0] if _is_words(found[0]) else SECRET, text)


def forms_of(secret: bytes) -> list[str]:
    """How a key may be written."""
    return [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode().rstrip("="),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        base64.b32encode(secret).decode().rstrip("="),
        base64.b32encode(secret).decode().rstrip("=").lower(),
        base58.b58encode(secret).decode(),
        repr(secret)[2:-1],
    ]


def hosts_in(text: str) -> set[str]:
    """Hosts of the multiaddrs in a text: where a log names them alone, they are taken out too."""
    return {found[0].rsplit("/", 1)[1] for found in _HOST_PART.finditer(text)}


def _place(text: str) -> str:
    """An address, or where it is that of every machine, the same."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        # A time of day and a digest with colons look like IPv6. A host part of a multiaddr is none of these.
        return text if ":" in text or re.fullmatch(r"[\d.]+", text) else ADDRESS
    return text if address.is_loopback or address.is_unspecified else ADDRESS


def _is_words(text: str) -> bool:
    """Whether a long run of letters is a path or a name of code: words between `/`, `_` and `-`."""
    parts = re.split(r"[/_-]", text)
    return len(parts) > 2 and all(re.fullmatch(r"[a-z]*|[A-Z]+|[A-Z]?[a-z]+|\d{1,4}", part) for part in parts)
