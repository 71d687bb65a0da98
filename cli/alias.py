"""`node`, our second name, which Node.js had first: what is meant for Node.js goes on to the next `node` on PATH.

Decided before anything else is imported, so that `node script.js` costs little.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from atoll.cli.command_table import COMMANDS
from atoll.cli.main import main as atoll

OUR_FLAGS = ("--help", "--home")
SUFFIXES = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts")
NODE_WORDS = ("inspect", "-")


def meant_for_node_js(args: Sequence[str], here: Path) -> bool:
    """Would a user of Node.js have typed this in the folder `here`?

    No argument (its prompt), any flag but ours, a script's name or a file, and nothing that is a command here.
    """
    if not args:
        return True
    first = args[0]
    if first in COMMANDS or first.split("=")[0] in OUR_FLAGS:
        return False
    if first.startswith("-") or first in NODE_WORDS or first.endswith(SUFFIXES):
        return True
    script = here / first
    beside = [script.with_name(script.name + suffix) for suffix in SUFFIXES[:3]] if script.name else []
    return script.exists() or any(path.is_file() for path in beside)


def next_node(search: str, ours: Path) -> Path | None:
    """The first other executable `node` on the path list `search`, behind ours where ours is on it.

    Looking only behind ourselves keeps two copies of this alias from calling each other for ever.
    """
    found = [Path(folder) / "node" for folder in search.split(os.pathsep) if folder]
    own = [at for at, path in enumerate(found) if _same(path, ours)]
    for path in found[own[0] + 1 if own else 0 :]:
        if path.is_file() and os.access(path, os.X_OK) and not _same(path, ours):
            return path
    return None


def main() -> int:
    """The console script. Does not return when it hands over."""
    args = sys.argv[1:]
    if meant_for_node_js(args, Path.cwd()):
        other = next_node(os.environ.get("PATH", ""), Path(sys.argv[0]))
        if other is not None:
            os.execv(other, ["node", *args])
    return atoll(args, name="node")


def _same(one: Path, other: Path) -> bool:
    try:
        return one.resolve(strict=True) == other.resolve(strict=True)
    except OSError:
        return False
