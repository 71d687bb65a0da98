"""Puts the page together from its files: markup, style, script, and the chart library, all in one reply.

One reply has one policy: the hashes of exactly these texts. uPlot is not ours; its licence is beside it.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from atoll.node.daemon.web.http_messages import NOTHING_ALLOWED, HttpReply

FOLDER = Path(__file__).parent
CHARTS = "uplot"
"""Folder of the chart library as it was published."""

_PART = re.compile(r"<(script|style)>file ([\w./-]+)</\1>")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> HttpReply:
    """The page, with a policy that runs only its own scripts and styles, by their hashes (CSP level 3).

    If a peer's name ever got into the page as markup, nothing in it would run or load. `require-trusted-types-for`
    makes the browser refuse to turn a text into markup at all.
    """
    text = _PART.sub(_inlined, (FOLDER / "page.html").read_text(encoding="utf-8"))
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, inside in _INLINE.findall(text):
        hashes[kind].append(f"'{_csp_hash(inside)}'")
    own = "; ".join(f"{kind}-src {' '.join(found)}" for kind, found in hashes.items())
    policy = f"{NOTHING_ALLOWED}; {own}; connect-src 'self'; img-src data:; require-trusted-types-for 'script'"
    return HttpReply(text.encode(), "text/html; charset=utf-8", policy=policy)


def _inlined(found: re.Match[str]) -> str:
    kind, name = found[1], found[2]
    return f"<{kind}>{(FOLDER / name).read_text(encoding='utf-8')}</{kind}>"


def _csp_hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
