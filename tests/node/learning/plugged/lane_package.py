"""The package with a model of lanes, installed."""

from pathlib import Path

from tests.node.learning.installed_package import on_the_path, write_package

LANES = Path(__file__).with_name("lanes.py").read_text(encoding="utf-8")


def write_lanes(folder: Path, *, package="atoll-lanes", module="lane_model", name="lanes.1", source=LANES) -> Path:
    """Write it into a folder that is to be on the path; returns the folder."""
    return write_package(
        folder, package=package, module=module, source=source, group="atoll.models", name=name, made="Lanes"
    )


def install_lanes(tmp_path: Path, monkeypatch, *, module="lane_model", **more) -> None:
    """Install it for one test."""
    on_the_path(write_lanes(tmp_path / f"site-{module}", module=module, **more), monkeypatch, module=module)
