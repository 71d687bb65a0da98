"""The packages of this environment as wheels in docker/wheelhouse, so that the image is built without a network.

What pip finds here (its configuration, a folder of wheels, a certificate) need not be known inside of the build,
and the image gets the versions that the tests ran with.
"""

import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.node.learning.data.shakespeare import ARCHIVE, archive_bytes, default_cache
from tests.compose.shell import ROOT, run

FOLDER = ROOT / "docker" / "wheelhouse"
BASE_PYTHON = (3, 11)
"""Wheels are for one Python: with another one here the build asks the package index."""
BUILD_NEEDS = ("setuptools>=77",)
FILL_S = 400.0


@contextmanager
def wheelhouse() -> Iterator[str]:
    """Filled for as long as the block lasts; says what is in it. Raises Failed, Unreachable."""
    if sys.version_info[:2] != BASE_PYTHON:
        yield "left empty: another Python than the image's"
        return
    try:
        _fill()
        sizes = [path.stat().st_size for path in FOLDER.iterdir()]
        yield f"{len(sizes) - 1} files, {sum(sizes) / 1e6:.0f} MB"
    finally:
        _empty()


def _fill() -> None:
    _empty()
    (FOLDER / ARCHIVE).write_bytes(archive_bytes(default_cache()))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    frozen = run(*pip, "freeze", "--exclude-editable", within_s=60).splitlines()
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(line for line in frozen if "==" in line))
        constraints.flush()
        run(
            *pip, "wheel", "--quiet", "--wheel-dir", str(FOLDER), "--constraint", constraints.name,
            *wanted, *BUILD_NEEDS, within_s=FILL_S,
        )  # fmt: skip


def _empty() -> None:
    for path in FOLDER.iterdir():
        if path.name != ".gitignore":
            path.unlink()
