"""The page of messages quotes messages of the program: a changed message changes the page."""

import ast
import re
from functools import cache

import pytest

from tests.test_docs import ROOT, text_of
from tests.test_layout import SOURCES, walked

ROW = re.compile(r'^\| "(.+?)" \| (.+?) \| (.+?) \|$', re.M)
ROWS = ROW.findall(text_of(ROOT / "docs" / "troubleshooting.md"))
pytestmark = pytest.mark.xdist_group("layout")


@cache
def texts() -> list[str]:
    """Every text of the program; `…` where a value is filled in. Neighbours that are one text are one."""
    found = []
    for tree in SOURCES.values():
        for node in walked(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
    return found


def test_there_are_messages():
    assert len(ROWS) > 25


@pytest.mark.parametrize("message", [row[0] for row in ROWS])
def test_a_message_is_one_of_the_program(message):
    parts = [part for part in message.split("…") if part.strip()]
    wanted = re.compile(".*".join(map(re.escape, (part.strip(" ;:,") for part in parts))), re.S)
    assert any(wanted.search(text) for text in texts()), message
