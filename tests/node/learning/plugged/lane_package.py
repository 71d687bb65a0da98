"""Installs a package with a model, as pip leaves one: a module, and metadata with an entry point."""

import importlib
import sys
from pathlib import Path

LANES = Path(__file__).with_name("lanes.py").read_text(encoding="utf-8")


def write_lanes(folder: Path, *, package="atoll-lanes", module="lane_model", name="lanes.1", source=LANES) -> Path:
    """Write an installed package into a folder that is to be on the path; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{module}.py").write_text(source)
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[atoll.models]\n{name} = {module}:Lanes\n")
    return folder


def install_lanes(tmp_path: Path, monkeypatch, *, module="lane_model", **more) -> None:
    """Install it for one test."""
    folder = write_lanes(tmp_path / f"site-{module}", module=module, **more)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
