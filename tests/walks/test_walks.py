"""The modules on the two walks of docs/architecture.md, traced in real processes.

Walk (a): a pseudo-gradient from the inner step on one node to the fold on another. Walk (b): `atoll start LINK`
to the first inner step. tests/walks/tracing defines when a module is on a walk. The page leaves out `protocols`,
the vocabulary of both. `python -m tests.walks.test_walks FOLDER` prints the lists of a traced FOLDER for the page.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import HANGS_S

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
MOST = {"a": 74, "b": 133}
"""The goals are 55 and 70 (docs/log/2026-11.md). Members that leave for good added two and three, floods two
and three, removal none and one, members that keep back their votes one,
workers that outlive a daemon one, what fits into a machine one, how a run is doing two, weights that
are encoded where they stand one, histograms one, loggers one, readiness for a service manager one,
control groups one, short invites one, the limits of a guest two, rows of old rounds on the disk one,
states in mapped files one and three, the next step's batch one, ledgers that are cut one, estimates
of a start one, groups that arrive together one, places of reducers and modes of devices two that were there,
the worker's lean import of torch none and two, what a set adds in a module of its own none and one,
work of another chain none and one, members that rounds closed without one and none, leaps none and one."""
SEEN_LEAST = 0.9
"""Part of the page's list that every trace finds: what runs at the side depends on timing."""

BESIDE = {f"node/daemon/consensus/{name}.py" for name in ("chains/epochs", "exclusion", "orphans")}
BESIDE |= {
    f"node/daemon/{name}.py" for name in ("removal/removals", "removal/requests", "standing_still/absent_members")
}
BESIDE.add("node/daemon/standing_still/stillness.py")
"""Not of a walk, but seen when the status is asked for, at a tick, or when a round waits longer than usual."""


def documented(walk: str) -> set[str]:
    """The page's list of a walk."""
    found = re.search(rf"<!-- walk-{walk}:begin -->(.*)<!-- walk-{walk}:end -->", PAGE.read_text(), re.DOTALL)
    assert found is not None
    rows = re.findall(r"^\| `([a-z0-9_/]+/)` \| (.+) \|$", found[1], re.MULTILINE)
    return {f"{room}{name}.py" for room, names in rows for name in names.split(", ")}


def traced(folder: Path) -> dict[str, set[str]]:
    """Both walks as the processes noted them; (b) is that of the process group that `joiner` names."""
    joiner = set((folder / "joiner").read_text().split())
    walks: dict[str, set[str]] = {"a": set(), "b": set()}
    for noted in folder.glob("[dw]*-*"):
        for line in noted.read_text().splitlines():
            label, place = line.split(" ")
            if place.startswith("protocols/"):
                continue
            if label == "walk":
                walks["a"].add(place)
            elif noted.name.split("-")[1] in joiner:
                walks["b"].add(place)
    return walks


def walked(nodes, until, folder, monkeypatch, limit_s):
    """Trace two nodes until the contribution that is followed is folded; False where that was not in time."""
    folder.mkdir()
    monkeypatch.setenv("WALK_FOLDER", str(folder))
    owner, member = nodes(f"owner-{folder.name}"), nodes(f"member-{folder.name}")
    owner.new_run("--data", "synthetic:markov", "--set", "pace.min_members=2", "--set", "outer.overlap_steps=0")
    with monkeypatch.context() as tracing:
        tracing.setenv("PYTHONPATH", str(Path(__file__).parent / "tracing"))
        owner.start().up()
        link = until(
            "there is a link", lambda: (i := owner.atoll("invite")).code == 0 and i.out.strip().split()[-1]
        )
        member.start(link, "--yes").up()
        with suppress(AssertionError):
            until("a contribution is folded by the other node", (folder / "folded").exists, limit_s)
        (folder / "joiner").write_text(f"{member.process.pid} {member.status()['worker_pid']}")
        member.stop()
        owner.stop()
    return (folder / "folded").exists()


@pytest.mark.slow(
    slice=(
        "test_a_walk_is_short_enough_to_read, "
        "tests/test_docs.py::test_paths_exist, "
        "tests/test_docs.py::test_files_that_are_named_without_their_folder_exist"
    )
)
@pytest.mark.swarm
def test_the_pages_lists_are_what_runs(nodes, until, tmp_path, monkeypatch):
    monkeypatch.setenv("WALK_ROOT", str(ROOT))
    # One contribution is followed. On a busy machine it may be late, and then in no set: another swarm is asked.
    found = (
        folder
        for folder, limit_s in ((tmp_path / "one", 90.0), (tmp_path / "two", 90.0), (tmp_path / "three", HANGS_S))
        if walked(nodes, until, folder, monkeypatch, limit_s)
    )
    folder = next(found, None)
    assert folder is not None, "no contribution that was followed was folded by the other node"
    for walk, places in traced(folder).items():
        listed = documented(walk)
        places -= BESIDE
        assert places <= listed, f"walk {walk}: not in docs/architecture.md: {sorted(places - listed)}"
        assert len(places) >= SEEN_LEAST * len(listed), f"walk {walk}: never seen: {sorted(listed - places)}"


@pytest.mark.parametrize("walk", MOST)
def test_a_walk_is_short_enough_to_read(walk):
    listed = documented(walk)
    assert {path for path in listed if not (ROOT / path).is_file()} == set()
    assert 20 < len(listed) <= MOST[walk]


if __name__ == "__main__":
    for name, found in traced(Path(sys.argv[1])).items():
        print(f"walk {name}: {len(found)} modules\n\n| room | modules |\n|---|---|")
        rooms: dict[str, list[str]] = {}
        for place in sorted(found):
            rooms.setdefault(place.rpartition("/")[0], []).append(Path(place).stem)
        print(*(f"| `{room}/` | {', '.join(names)} |" for room, names in rooms.items()), sep="\n")
