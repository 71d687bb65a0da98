"""The site builds without a warning, has every page, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from atoll.cli.command_table import COMMANDS
from tests.site.pages import FRONT, ROOT, SPECS, commands, linked, pages, runspec

LOADED = re.compile(
    r'<(?:script|img|iframe|source)[^>]* src="(https?:)?//|<link[^>]*stylesheet[^>]* href="(https?:)?//'
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site's folder, and what building it said."""
    folder = tmp_path_factory.mktemp("site")
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return folder, ran


@pytest.fixture
def site(built) -> Path:
    return built[0]


def test_it_is_built_without_a_warning(built):
    _, ran = built
    # Not with --quiet: it hides warnings from --strict too, as of a page that no menu names.
    assert ran.returncode == 0, ran.stderr
    assert not re.search(r"^(WARNING|ERROR)", ran.stderr, re.MULTILINE), ran.stderr


def test_every_page_is_there(site):
    names = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} | set(pages())
    assert len(names) > 80
    for name in names:
        place = site / re.sub(r"README\.md$", "index.md", name)
        assert place.with_suffix(".html").is_file(), name


def test_nothing_is_loaded_from_elsewhere(site):
    assert LOADED.search('<script src="https://x/y.js">')
    assert not [page for page in site.rglob("*.html") if LOADED.search(page.read_text(encoding="utf-8"))]


def test_the_reference_has_every_command_and_every_key():
    text = commands()
    assert all(f"## atoll {name}\n" in text for name in COMMANDS)
    assert "## atoll run new\n" in text
    keys = runspec()
    for spec in SPECS:
        assert f"## {spec.__name__}\n" in keys
        assert all(f"| `{field}` |" in keys for field in spec.__struct_fields__)
    known = {spec.__name__ for spec in SPECS}
    named = {word for spec in SPECS for word in re.findall(r"\b\w+Spec\b", str(msgspec.inspect.type_info(spec)))}
    assert named <= known


@pytest.mark.parametrize(
    ("place", "link", "there"),
    [
        ("about.md", "[a](docs/fold.md#b)", "[a](fold.md#b)"),
        ("wires/run.md", "[a](../../README.md)", "[a](../about.md)"),
        ("containers.md", "[a\nb](../docs/web.md)", "[a\nb](web.md)"),
        ("about.md", "[a](LICENSE)", "[a](licence.md)"),
        ("fold.md", "[a](https://example.org/x) [b](#c)", "[a](https://example.org/x) [b](#c)"),
    ],
)
def test_links_are_those_of_the_site(place, link, there):
    assert linked(link, place) == there


def test_a_link_to_what_the_site_does_not_have_is_refused():
    with pytest.raises(ValueError, match=r"the site has no tests/x\.py"):
        linked("[a](../tests/x.py)", "fold.md")


def test_front_pages_exist():
    assert all((ROOT / name).is_file() for name in FRONT)
