"""The page: it reads what data.json has, runs nothing that is not its own, and loads nothing."""

import base64
import gzip
import hashlib
import re

import pytest

from atoll.node.daemon.web.http_messages import HttpRequest
from atoll.node.daemon.web.measurements import SHARES
from atoll.node.daemon.web.page_data import ResourceUse, RoundWork, RunPace, SampleText
from atoll.node.daemon.web.page_file import CHARTS, FOLDER, page
from atoll.protocols.local.control_messages import LimitUse, PeerStatus, RoundStatus, Status
from atoll.protocols.local.privacy_now import PrivacyNow

TEXT = page().body.decode()
SCRIPTS = re.findall(r"<script>(.*?)</script>", TEXT, re.DOTALL)
OURS = "".join((FOLDER / name).read_text() for name in ("page.html", "page.css", "charts.js", "page.js"))
"""All of the page but the library."""
SCRIPT = (FOLDER / "page.js").read_text()
PUBLISHED = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
"""SHA-256 of the files of uPlot 1.6.32 in its npm package."""
NAMED = r"\b{}\.([a-z_]+)\b(?!\()"
COMPRESSED_MAX_BYTES = 200_000


def test_only_its_own_scripts_and_styles_run():
    policy = dict(part.split(" ", 1) for part in page().policy.split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert len(SCRIPTS) == TEXT.count("<script") == 3
    for kind in ("script", "style"):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", TEXT, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert policy[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
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
        assert word not in OURS
    assert not re.findall(r"\son\w+\s*=|\sstyle=|\ssrc=|url\(|@import", OURS)
    assert set(re.findall(r"https?://[^\"' ]+", OURS)) == {"http://www.w3.org/2000/svg"}
    assert "<script>file" not in TEXT
    assert "<style>file" not in TEXT


def test_the_library_is_as_it_was_published_and_has_its_licence():
    folder = FOLDER / CHARTS
    assert "MIT" in (folder / "LICENSE").read_text()
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("uPlot*")}
    assert digests == PUBLISHED
    assert (folder / "uPlot.iife.min.js").read_text() in TEXT


def test_the_whole_page_is_small():
    assert len(gzip.compress(page().body)) <= COMPRESSED_MAX_BYTES


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("now", Status),
        ("row", RoundStatus),
        ("peer", PeerStatus),
        (r"data\.status", Status),
        ("use", ResourceUse),
        ("found", RoundWork),
        ("pace", RunPace),
        ("privacy", PrivacyNow),
        ("wrote", SampleText),
        ("limits", LimitUse),
    ],
)
def test_it_reads_fields_that_are_there(name, kind):
    named = set(re.findall(NAMED.format(name), SCRIPT)) - {"append", "id"}
    assert named
    assert named <= set(kind.__struct_fields__)


def test_every_share_of_the_time_is_drawn():
    reasons = re.search(r"const REASONS = \[(.*?)\]", SCRIPT)
    assert {f"{reason}_s" for reason in re.findall(r'"(\w+)"', reasons[1])} == set(SHARES)
    for share in SHARES:
        assert f".{share.removesuffix('_s')} {{ fill:" in TEXT


def test_every_element_that_the_script_writes_to_is_there():
    wanted = set(re.findall(r'(?:at|write|pairs|press|Chart)\("(\w+)"', SCRIPT))
    wanted |= {f"{name}Read" for name in re.findall(r'new Chart\("(\w+)"', SCRIPT)}
    there = set(re.findall(r'\bid="(\w+)"', OURS))
    assert wanted <= there
    named = set(re.findall(r'(?:for|aria-labelledby|aria-controls)="(\w+)"|href="#(\w+)"', OURS))
    assert there - wanted <= {name for pair in named for name in pair}


async def test_it_is_the_root(site):
    answer = await site.answer(HttpRequest("/", {}, "*/*"))
    assert answer == page()
    assert answer.content_type.startswith("text/html")


def test_a_name_stands_after_the_tail_of_its_peer_id():
    """In the one function that the page shows names with; tests/page has it in a browser."""
    assert "const called = (peer, name) => tail(peer) + " in SCRIPT
    uses = re.findall(r"^.*\b(?:now|peer)\.names?\b.*$", SCRIPT, re.MULTILINE)
    assert len(uses) == 4
    assert [line for line in uses if "called(" not in line and "name: now.name" not in line] == []
