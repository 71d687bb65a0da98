"""The page: it reads what data.json has, runs nothing that is not its own, and loads nothing."""

import base64
import hashlib
import re

import pytest

from atoll.node.daemon.web.http_messages import HttpRequest
from atoll.node.daemon.web.metrics import SHARES
from atoll.node.daemon.web.site import Site, page
from atoll.protocols.local.control_messages import PeerStatus, RoundStatus, Status

TEXT = page().body.decode()
SCRIPT = re.findall(r"<script>(.*?)</script>", TEXT, re.DOTALL)
NAMED = r"\b{}\.([a-z_]+)\b(?!\()"


def test_only_its_own_script_and_style_run():
    policy = dict(part.split(" ", 1) for part in page().policy.split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert len(SCRIPT) == TEXT.count("<script") == 1
    digest = base64.b64encode(hashlib.sha256(SCRIPT[0].encode()).digest()).decode()
    assert policy["script-src"] == f"'sha256-{digest}'"
    assert "unsafe" not in page().policy


def test_nothing_is_written_as_markup_and_nothing_is_loaded():
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "Function(",
        "srcdoc",
        "<!--",
    ):
        assert word not in TEXT
    assert not re.findall(r"\son\w+\s*=|\sstyle=|\ssrc=|url\(|@import", TEXT)
    assert set(re.findall(r"https?://[^\"' ]+", TEXT)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("now", Status), ("row", RoundStatus), ("peer", PeerStatus), (r"data\.status", Status)],
)
def test_it_reads_fields_that_are_there(name, kind):
    named = set(re.findall(NAMED.format(name), SCRIPT[0])) - {"append"}
    assert named
    assert named <= set(kind.__struct_fields__)


def test_every_share_of_the_time_is_drawn():
    reasons = re.search(r"const REASONS = \[(.*?)\]", SCRIPT[0])
    assert {f"{reason}_s" for reason in re.findall(r'"(\w+)"', reasons[1])} == set(SHARES)
    for share in SHARES:
        assert f".{share.removesuffix('_s')} {{ fill:" in TEXT


def test_every_element_that_the_script_writes_to_is_there():
    wanted = set(re.findall(r'(?:at|write|curves)\("(\w+)"', SCRIPT[0]))
    assert wanted == set(re.findall(r'\bid="(\w+)"', TEXT))


async def test_it_is_the_root(node):
    answer = await Site(node).answer(HttpRequest("/", {}, "*/*"))
    assert answer == page()
    assert answer.content_type.startswith("text/html")
