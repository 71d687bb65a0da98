"""The conformance lab of the transports, with every host under limits."""

import importlib.util
import itertools
from pathlib import Path

import pytest

from atoll.p2p.limits.config import LimitsConfig, read_limits
from atoll.p2p.limits.limited_host import LimitedHost
from atoll.p2p.transports.memory.virtual_time import run_virtual


def load(path: Path):
    """A test module of the parent folder; test folders are no packages."""
    spec = importlib.util.spec_from_file_location(f"limits_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PARENT = load(Path(__file__).parent.parent / "conftest.py")


class LimitedLab(PARENT.Lab):
    """As in memory, every host wrapped."""

    def __init__(self, config: LimitsConfig, folder: Path) -> None:
        super().__init__("memory")
        self._limits = read_limits(config)
        self._files = (folder / f"month{number}" for number in itertools.count())

    def _make(self, identity):
        return LimitedHost(super()._make(identity), self._limits, next(self._files))

    def kill_transport(self, host) -> None:
        super().kill_transport(host.inner)


@pytest.fixture
def lab_of(tmp_path):
    """Run a scenario on hosts under a configuration."""
    return lambda config, scenario: run_virtual(LimitedLab(config, tmp_path).run(scenario))


@pytest.fixture(params=[LimitsConfig(up="160mbit", down="20MB/s"), LimitsConfig(), LimitsConfig(monthly="1TB")])
def run_lab(request, lab_of):
    """What the conformance tests run on."""
    return lambda scenario: lab_of(request.param, scenario)


@pytest.fixture
def dial():
    """The address of a host."""
    return PARENT.address_of
