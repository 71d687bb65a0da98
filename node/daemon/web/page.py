"""The page: one file, drawn by its own script from data.json. Nothing is loaded from anywhere else."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from atoll.node.daemon.web.reply import NOTHING, HttpReply

_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@cache
def page() -> HttpReply:
    """The page and a policy by which its own script and style alone run, by their hashes (CSP level 3).

    Should a name of a peer ever get into the page as markup, nothing in it runs or loads.
    """
    text = _FILE.read_text(encoding="utf-8")
    hashes = {kind: _hash(inside) for kind, inside in _INLINE.findall(text)}
    own = f"script-src '{hashes['script']}'; style-src '{hashes['style']}'"
    policy = f"{NOTHING}; {own}; connect-src 'self'; img-src data:"
    return HttpReply(text.encode(), "text/html; charset=utf-8", policy=policy)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
