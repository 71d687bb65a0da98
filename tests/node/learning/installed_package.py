"""Installs a package with an entry point, as pip leaves one: a module, and metadata."""

import importlib
import sys
from pathlib import Path


def write_package(
    folder: Path, *, package: str, module: str, source: str, group: str, name: str, made: str
) -> Path:
    """Write an installed package into a folder that is to be on the path; returns the folder.

    Its entry point `name` of the group names what `made` is in the module.
    """
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{made}\n")
    return folder


def on_the_path(folder: Path, monkeypatch, *, module: str) -> None:
    """Make a written package an installed one, for one test."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
