"""`Swarm` for notebooks: real processes, rows of all of them, and nothing left behind."""

import builtins

import psutil
import pytest

from atoll.cli.sim import notebook
from atoll.cli.sim.notebook import Swarm
from atoll.protocols.errors import ConfigError, LocalFault
from tests.later import pandas
from tests.waiting import poll


def lives(pid: int) -> bool:
    """A worker and a host's process end a moment after their daemon; then the system reaps them."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_swarm_trains_and_leaves_nothing(monkeypatch):
    seen = []
    real = notebook.all_rows

    def watched(swarm, patience_s):
        seen.extend(owner.pids)
        return real(swarm, patience_s)

    monkeypatch.setattr(notebook, "all_rows", watched)
    with Swarm(2, preset="tiny", data="synthetic:markov") as owner:
        assert owner.pids == []
        frame = owner.run(rounds=2, steps=2).frame()
        assert isinstance(frame, pandas.DataFrame)
        assert set(frame.node) == {0, 1}
        assert set(frame["round"]) == {0, 1}
        assert frame.final.all()
        assert frame.groupby("round").digest.nunique().tolist() == [1, 1], "both have one model"
        assert len(owner.rows()) == len(frame)
        assert len(seen) >= 4, "daemons and workers"
        poll("all processes have ended", lambda: not any(map(lives, seen)))
        with pytest.raises(ConfigError, match="this swarm has run"):
            owner.run()
    assert not owner.folder.exists()


def test_a_failure_ends_all_processes(monkeypatch, tmp_path):
    seen = []

    def broken(swarm, patience_s, progress):
        seen.extend(owner.pids)
        raise LocalFault("something broke")

    monkeypatch.setattr(notebook, "play", broken)
    owner = Swarm(1, data="synthetic:markov", folder=tmp_path)
    with pytest.raises(LocalFault):
        owner.run(rounds=2)
    assert seen
    poll("all processes have ended", lambda: not any(map(lives, seen)))
    owner.close()
    assert (tmp_path / "node-0").is_dir(), "a folder that was given stays"


def test_without_pandas_it_is_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with Swarm() as swarm, pytest.raises(ConfigError) as refused:
        swarm.frame()
    assert refused.value.line() == "frames need the package pandas; pip install 'atoll[notebook]', or use .rows()"


def test_what_cannot_be_is_refused_before_anything_starts():
    with Swarm(1, settings=("outer.nothing=1",)) as swarm:
        with pytest.raises(ConfigError, match=r"unknown key outer\.nothing"):
            swarm.run()
        assert swarm.pids == []
