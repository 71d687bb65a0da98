"""Installs a package with a term of the loss, as pip leaves one: a module, and metadata with an entry point."""

import importlib
import sys
from pathlib import Path

SQUARES = '''
from atoll.protocols.errors import ConfigError


class Squares:
    """The mean square of the hidden states: a mean over tokens, so parts need nothing of each other."""

    def __init__(self, width, tokens, settings):
        for name in settings:
            raise ConfigError(f"objective squares.1 has no setting {name}")

    def begin(self, seed, device):
        pass

    def means(self, hidden_ND):
        return hidden_ND.new_zeros(1)

    def term(self, hidden_ND, pool):
        return hidden_ND.float().square().mean(1)REDUCE
'''


def write_package(
    folder: Path, *, package="atoll-squares", module="squares", name="squares.1", source=None, reduce=".mean()"
) -> Path:
    """Write an installed package into a folder that is to be on the path; returns the folder."""
    folder.mkdir(exist_ok=True)
    text = SQUARES.replace("REDUCE", reduce) if source is None else source
    (folder / f"{module}.py").write_text(text)
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[atoll.objectives]\n{name} = {module}:Squares\n")
    return folder


def install(tmp_path: Path, monkeypatch, *, module="squares", **more) -> None:
    """Install it for one test."""
    folder = write_package(tmp_path / f"site-{module}", module=module, **more)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
