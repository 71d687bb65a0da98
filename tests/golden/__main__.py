"""Write golden files again, after a wire or a format got a new version.

    python -m tests.golden rewrite [NAME ...]

A line is printed for each value that changed. Nothing else writes these files: a test only compares.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SOURCES = {
    "wires": "tests.golden.messages",
    "payload": "tests.node.learning.compress.test_sparse2",
    "codecs": "tests.node.learning.compress.test_codecs",
    "trajectory": "tests.node.learning.outer.test_fold",
    "muon": "tests.node.learning.inner.test_muon",
    "slow_momentum": "tests.node.learning.inner.test_slow_momentum",
    "lora": "tests.node.learning.model.test_lora",
    "late": "tests.node.worker.test_local_weights",
    "objective": "tests.node.worker.test_objective",
    "gossip": "tests.node.worker.pulls.test_neighbour_mixing",
    "scalars": "tests.node.learning.zeroth_order.test_scalar_fold",
}
"""The module whose function `golden()` returns the content of each file."""


def recorded(name: str, folder: Path = FOLDER) -> Any:
    """Content of a golden file."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def computed(name: str) -> Any:
    """What this tree computes for a golden file, as JSON gives it back."""
    return json.loads(json.dumps(importlib.import_module(SOURCES[name]).golden()))


def flat(value: Any, at: str = "") -> dict[str, Any]:
    """The leaves of JSON by their paths."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        return {at: value}
    return {path: leaf for key, part in parts for path, leaf in flat(part, f"{at}/{key}").items()}


def rewrite(name: str, folder: Path, report: Callable[[str], None]) -> None:
    """Write one golden file. `report` receives a line for each value that changed."""
    path = folder / f"{name}.json"
    before, found = flat(recorded(name, folder)) if path.exists() else {}, computed(name)
    after = flat(found)
    for key in sorted(before.keys() | after.keys()):
        if key not in after or key not in before or before[key] != after[key]:
            state = "removed" if key not in after else "new" if key not in before else "CHANGED"
            report(f"{state:8} {name}{key}")
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("rewrite", help="write golden files again")
    command.add_argument("names", nargs="*", metavar="NAME", choices=[*SOURCES, []], help="default: all of them")
    for name in parser.parse_args(arguments).names or SOURCES:
        rewrite(name, FOLDER, print)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
