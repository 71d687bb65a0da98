"""The page of messages quotes messages of the program: a changed message changes the page."""

import ast
import re

import pytest

from tests.test_docs import ROOT, text_of

ROW = re.compile(r'^\| "(.+?)" \| (.+?) \| (.+?) \|$', re.M)
ROWS = ROW.findall(text_of(ROOT / "docs" / "troubleshooting.md"))
SOURCES = [path for area in ("cli", "node", "p2p", "protocols") for path in (ROOT / area).rglob("*.py")]


def texts() -> list[str]:
    """Every text of the program; `…` where a value is filled in. Neighbours that are one text are one."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(parts))
    return found


TEXTS = texts()


def test_there_are_messages():
    assert len(ROWS) > 25


@pytest.mark.parametrize("message", [row[0] for row in ROWS])
def test_a_message_is_one_of_the_program(message):
    parts = [part for part in message.split("…") if part.strip()]
    wanted = re.compile(".*".join(map(re.escape, (part.strip(" ;:,") for part in parts))), re.S)
    assert any(wanted.search(text) for text in TEXTS), message
