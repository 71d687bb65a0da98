"""For which tree `make compose-test` last held: a hash of docker/ and pyproject.toml, written by such a run."""

import hashlib
import json
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("last_run.json")


def tree_hash(root: Path = ROOT) -> str:
    """SHA-256 over names and contents of docker/ and pyproject.toml, without the wheels of a build."""
    files = [root / "pyproject.toml", *(path for path in (root / "docker").iterdir() if path.is_file())]
    whole = hashlib.sha256()
    for path in sorted(files):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def write_record(seconds: float, engine: str, record: Path = RECORD, root: Path = ROOT) -> None:
    """Record that the whole story held for this tree. Only `python -m tests.compose` calls it, at its end."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    run = {"tree": tree_hash(root), "day": day, "seconds": round(seconds), "engine": engine}
    record.write_text(json.dumps(run, indent=1) + "\n")


def untested(record: Path = RECORD, root: Path = ROOT) -> str:
    """Why the containers of this tree are not tested; empty if the last run that held was of this tree."""
    if not record.is_file():
        return "no run of `make compose-test` is recorded"
    run = json.loads(record.read_text())
    if run["tree"] != tree_hash(root):
        return f"docker/ or pyproject.toml changed since the run of {run['day']}; run `make compose-test`"
    return ""
