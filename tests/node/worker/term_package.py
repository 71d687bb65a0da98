"""The package with a term of the loss, installed."""

from pathlib import Path

from tests.node.learning.installed_package import on_the_path, write_package

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


def write_term(
    folder: Path, *, package="atoll-squares", module="squares", name="squares.1", source=None, reduce=".mean()"
) -> Path:
    """Write it into a folder that is to be on the path; returns the folder."""
    text = SQUARES.replace("REDUCE", reduce) if source is None else source
    return write_package(
        folder, package=package, module=module, source=text, group="atoll.objectives", name=name, made="Squares"
    )


def install(tmp_path: Path, monkeypatch, *, module="squares", **more) -> None:
    """Install it for one test."""
    on_the_path(write_term(tmp_path / f"site-{module}", module=module, **more), monkeypatch, module=module)
