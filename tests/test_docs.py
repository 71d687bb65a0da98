"""The rules of the documentation: sizes, lines, links, terms, and files that exist."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "docs" / "log"
AREAS = ("protocols", "p2p", "node", "cli", "tests", "docs", "docker")
FRONT = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docker/README.md")
]
EVERY_PAGE = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in EVERY_PAGE if page.parent != LOG or page.name == "README.md"]
"""Every page but the months of the log, which keep the names and the lines of their day."""
PAGE_BYTES = 14_000
LINE_CHARACTERS = 100
_TERMS = """
acknowledgement anchor arena atom attempt blob certificate chunk circuit codec contribution cover daemon digest
entry expert feed fold fragment frontier generation genesis goodput grace holder home host identity invite lease
ledger member moments node overlap patience payload peer permit preset promise proposal pseudo-gradient quorum
rank reduction register relay rendezvous reputation residual round run runspec seed set share slice snapshot
swarm view vote voter weight worker
"""
TERMS = frozenset(_TERMS.split())
"""Words with a meaning of their own here. A page for newcomers that uses one needs it in the glossary."""
PATH = re.compile(rf"`((?:{'|'.join(AREAS)})/[\w./-]*)`")
MODULE = re.compile(r"`(atoll(?:\.\w+)+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchor_of(heading: str) -> str:
    """The fragment of a heading's address, as GitHub makes it."""
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return plain.strip().replace(" ", "-")


def anchors_of(path: Path) -> set[str]:
    return {anchor_of(heading) for heading in HEADING.findall(text_of(path))}


def test_there_is_something_to_check():
    assert len(PAGES) > 40
    assert len(EVERY_PAGE) > len(PAGES)


def test_pages_are_short():
    # A list of all changes only grows; nobody reads it from the top to the end.
    sizes = {name_of(page): page.stat().st_size for page in PAGES if page.name != "CHANGELOG.md"}
    assert not {name: size for name, size in sizes.items() if size > PAGE_BYTES}


def test_lines_outside_tables_are_short():
    wrong = [
        f"{name_of(page)}:{number} has {len(line)} characters"
        for page in PAGES
        for number, line in enumerate(text_of(page).splitlines(), 1)
        if len(line) > LINE_CHARACTERS and not line.lstrip().startswith("|")
    ]
    assert not wrong, "\n".join(wrong)


def test_paths_exist():
    """Every `folder/file` in backticks. The log keeps the names of its day."""
    wrong = [
        f"{name_of(page)}: {path}"
        for page in PAGES
        for path in PATH.findall(text_of(page))
        if not (ROOT / path.rstrip("/")).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_files_that_are_named_without_their_folder_exist():
    """`machine.py` in a table of a room's modules, or `test_round.py`."""
    there = {path.name for area in AREAS for path in (ROOT / area).rglob("*.py")}
    wrong = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in re.findall(r"`(\w+\.py)`", text_of(page))
        if name not in there
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_exist():
    wrong = []
    for page in PAGES:
        for name in MODULE.findall(text_of(page)):
            path = ROOT.joinpath(*name.split(".")[1:])
            if not (path.is_dir() or path.with_suffix(".py").exists() or importlib.util.find_spec(name)):
                wrong.append(f"{name_of(page)}: {name}")
    assert not wrong, "\n".join(wrong)


def test_classes_exist():
    """Every `CamelCase` name in backticks occurs in the sources, ours or another program's that they name."""
    sources = "\n".join(text_of(path) for area in AREAS for path in (ROOT / area).rglob("*.py"))
    known = set(re.findall(r"\b[A-Z]\w*[a-z]\w*\b", sources))
    wrong = [
        f"{name_of(page)}: {name}"
        for page in PAGES
        for name in re.findall(r"`([A-Z][a-z0-9]+[A-Z]\w*)(?:\.\w+)?`", text_of(page))
        if name not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_pages_that_the_sources_name_exist():
    """A docstring that sends its reader to a page, and the Makefile too."""
    sources = [path for area in AREAS for path in (ROOT / area).rglob("*.py")]
    wrong = [
        f"{name_of(source)}: {path}"
        for source in [*sources, ROOT / "Makefile", ROOT / "pyproject.toml"]
        for path in re.findall(r"\bdocs/[\w/-]+(?:\.md)?", text_of(source))
        if not (ROOT / path).exists()
    ]
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere():
    wrong = []
    for page in EVERY_PAGE:
        for target in LINK.findall(text_of(page)):
            if "://" in target:
                continue
            file, _, fragment = target.partition("#")
            there = (page.parent / file).resolve() if file else page
            if not there.exists() or (fragment and fragment not in anchors_of(there)):
                wrong.append(f"{name_of(page)}: {target}")
    assert not wrong, "\n".join(wrong)


def test_pages_are_on_the_map():
    """Whoever reads docs/README.md finds every page: there, or on the index of its folder."""
    listed = set()
    for index in (ROOT / "docs").rglob("README.md"):
        listed |= {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(text_of(index))}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "README.md"]
    missing = [name_of(page) for page in pages if page not in listed]
    assert not missing, missing


def glossary() -> set[str]:
    """Its terms, lower case; `Θ, Θ_final` are two."""
    headings = re.findall(r"^### (.+)$", text_of(ROOT / "docs" / "glossary.md"), re.M)
    return {part.split(" (")[0].strip().lower() for heading in headings for part in heading.split(",")}


def test_the_glossary_is_in_order():
    headings = re.findall(r"^### (.+)$", text_of(ROOT / "docs" / "glossary.md"), re.M)
    latin = [heading.lower() for heading in headings if heading.isascii()]
    assert len(set(latin)) == len(latin)
    assert latin == sorted(latin)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_terms_are_in_the_glossary(page: str):
    """A term is a word of the list above, alone or in the plural, or whatever links to the glossary."""
    text = text_of(ROOT / page)
    words = set(re.findall(r"[a-z][a-z-]+", text.lower()))
    used = {term for term in TERMS if {term, f"{term}s", f"{term[:-1]}ies"} & words}
    linked = set(re.findall(r"glossary\.md#([\w-]+)", text))
    assert used | linked <= glossary(), (used | linked) - glossary()


QUESTIONS = {
    "a new codec": "node/learning/compress/codecs.py",
    "the grace of a round": "node/runs/presets.py",
    "what `status` shows": "node/daemon/status.py",
    "a new preset": "node/runs/presets.py",
    "the relay's cap": "p2p/nat/relay.py",
    "how long a lease lasts": "node/runs/presets.py",
    "who may vote": "protocols/ledger/ballots.py",
    "the CSV/JSON of a bench": "tests/bench/report.py",
    "the invite's form": "protocols/run/invite.py",
    "what the page draws": "node/daemon/web/page.html",
}
"""Where a newcomer should end up, who knows README and docs/architecture.md."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_newcomer_finds_the_file_and_the_name(question: str):
    lines = text_of(ROOT / "docs" / "architecture.md").splitlines()
    rows = [line for line in lines if line.startswith(f"| {question} |")]
    assert len(rows) == 1
    _, _, places, names, _ = (cell.strip() for cell in rows[0].split("|"))
    assert QUESTIONS[question] in places
    sources = "\n".join(text_of(ROOT / path) for path in PATH.findall(places) if (ROOT / path).is_file())
    for name in re.findall(r"`([\w.]+)`", names):
        assert all(re.search(rf"\b{part}\b", sources) for part in name.split(".")), name


def promises():
    """Each row of README's table of promises: number, text, tests, measurements."""
    _, _, part = text_of(ROOT / "README.md").partition("## Promises")
    rows = [
        line.strip("|").split("|") for line in part.partition("## Map")[0].splitlines() if line.startswith("|")
    ]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names_of(path):
    """The strings of a module that are no docstrings: among them the names of its rows."""
    tree = ast.parse(text_of(path))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said)
    return "\n".join(node.value for node in found if isinstance(node.value, str))


def test_readme_has_each_promise_once():
    """The same numbers as CONTRIBUTING, which says them in a line each."""
    told = re.findall(r"^\| (P\d) \|", text_of(ROOT / "CONTRIBUTING.md"), re.M)
    assert [row[0] for row in promises() if row[0]] == told == [f"P{number}" for number in range(1, 10)]


def test_each_promise_names_tests_and_a_measurement_that_exist():
    benches = text_of(ROOT / "tests" / "bench" / "command.py")
    cases = text_of(ROOT / "tests" / "chaos" / "__main__.py") + text_of(ROOT / "tests" / "chaos" / "net_cases.py")
    left_out = cases.partition("LEFT_OUT = {")[2].partition("}")[0]
    wrong = []
    for number, promise, tests, measured in promises():
        files = re.findall(r"`(tests/[\w/]+\.py)`", tests)
        wrong += [f"{number}: {file} has no tests" for file in files if "def test_" not in text_of(ROOT / file)]
        named = re.findall(r"`atoll bench (\w+)`: “([^”]+)”", measured)
        played = [case for part in re.findall(r"--only ([\w,-]+)`", measured) for case in part.split(",")]
        for bench, row in named:
            names = "\n".join(map(names_of, (ROOT / "tests" / "bench" / bench).glob("*.py")))
            if f'"{bench}": "' not in benches or row not in names:
                wrong.append(f"{number}: bench {bench} has no row {row}")
        wrong += [
            f"{number}: chaos does not play {case}"
            for case in played
            if f'"{case}"' not in cases or f'"{case}":' in left_out
        ]
        if not files or not (named or played or "`atoll sim`" in measured):
            wrong.append(f"{number or promise}: nothing shows it")
    assert not wrong, "\n".join(wrong)
