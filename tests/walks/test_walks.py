"""How many modules a reader meets on the two walks of docs/architecture.md, traced in real processes.

Walk (a): a pseudo-gradient from the inner step on one node to the fold on another. Walk (b): `node start LINK` to the
first inner step. The page lists the modules; a trace that finds another list fails, and says which.
"""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
AREAS = ("protocols", "p2p", "node", "cli")
PAGE = ROOT / "docs" / "architecture.md"
MOST_A, MOST_B = 55, 70


def traced(folder: Path, pid: int, label: str) -> set[str]:
    """Modules, as paths in the repository, that the process noted under `label`."""
    role = next(folder.glob(f"[dw]*-{pid}"))
    noted = (line.split(" ", 1) for line in role.read_text().splitlines())
    return {Path(path).relative_to(ROOT).as_posix() for kind, path in noted if kind == label}


@pytest.mark.swarm
@pytest.mark.timeout(600)
def test_the_walks(nodes, until, tmp_path, monkeypatch):
    folder = tmp_path / "walk"
    folder.mkdir()
    monkeypatch.setenv("WALK_FOLDER", str(folder))
    monkeypatch.setenv("WALK_ROOTS", os.pathsep.join(f"{ROOT / area}/" for area in AREAS))
    owner, member = nodes("owner"), nodes("member")
    owner.new_run("--data", "synthetic:markov", "--set", "pace.min_members=2", "--set", "outer.overlap_steps=0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "tracing"))
    owner.start().up()
    link = until("there is a link", lambda: (i := owner.atoll("invite")).code == 0 and i.out.strip().split()[-1])
    member.start(link, "--yes").up()
    until("the contribution is on its way", (folder / "target").exists, 300)
    goal = max(owner.final(), member.final()) + 2
    until("it is folded", lambda: min(owner.final(), member.final()) >= goal, 300)
    pids = {name: (node.process.pid, node.status()["worker_pid"]) for name, node in (("o", owner), ("m", member))}
    member.stop()
    owner.stop()
    walk_a = set.union(*(traced(folder, pid, "walk") for pair in pids.values() for pid in pair))
    walk_b = set.union(*(traced(folder, pid, "start") for pid in pids["m"]))
    import shutil

    shutil.copytree(folder, "/tmp/walkout", dirs_exist_ok=True)
    print("PIDS", pids)
    print(*sorted(walk_a), "", *sorted(walk_b), sep="\n")
    without = {path for path in walk_a if not path.startswith("protocols/")}
    print(len(walk_a), len(without), len(walk_b), len({p for p in walk_b if not p.startswith("protocols/")}))
