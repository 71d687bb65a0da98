"""A run that this machine can never train is not joined by `--yes`; a person may, who says so."""

import io
import os
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from atoll.cli.node_commands import running
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon.telemetry.run_outlook import RunOutlook
from atoll.node.runs.capacity.machine_fit import Machine
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.presets import preset
from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import peer_id_of

SPEC = preset("tiny", peer_id_of(bytes(range(32))), 1)
TOO_SMALL, LARGE = (Machine(size, size, "cpu") for size in (1 << 20, 1 << 50))


def outlook(final):
    """What three members say."""
    return RunOutlook(
        members=3,
        round=final + 1,
        final=final,
        round_s=2.5,
        tokens_per_s=7000.0,
        owner_final=final,
        loss=1.75,
        pace_s=None,
    )


class Stdin(io.StringIO):
    """A terminal, or not."""

    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.fixture
def agree(monkeypatch):
    """Agree on a machine; returns what was asked, with its default. Answers with that default."""
    plan = SimpleNamespace(
        run=SimpleNamespace(spec=SPEC), config=NodeConfig(device="cpu", threads=1), room=None, invite=None,
        free=Free(1 << 50, 1 << 50), outlook=None, home=Home(Path("/nowhere")),
    )  # fmt: skip
    asked = []

    async def confirm(question, *, default):
        asked.append((question, default))
        return default

    async def on(machine, *, yes, is_terminal, outlook=None, disk_bytes=1 << 50):
        plan.outlook = outlook
        plan.free = Free(1 << 50, disk_bytes)
        monkeypatch.setattr(running, "measure_machine", lambda device: machine)
        monkeypatch.setattr(running, "_confirm", confirm)
        monkeypatch.setattr(running.sys, "stdin", Stdin(is_terminal))
        await running._agree(plan, yes=yes)
        return asked

    return on


@pytest.mark.parametrize(("yes", "is_terminal"), [(True, True), (True, False), (False, False)])
async def test_yes_does_not_join_what_can_never_work_here(agree, yes, is_terminal):
    with pytest.raises(ConfigError) as refused:
        await agree(TOO_SMALL, yes=yes, is_terminal=is_terminal)
    assert str(refused.value).startswith("this machine cannot train 'tiny': it needs ")
    assert refused.value.hint == "join from a larger machine", "no preset fits into a megabyte"


@pytest.mark.parametrize(("yes", "is_terminal"), [(True, True), (False, False)])
async def test_yes_does_not_join_what_the_disk_cannot_hold(agree, yes, is_terminal):
    with pytest.raises(ConfigError) as refused:
        await agree(LARGE, yes=yes, is_terminal=is_terminal, disk_bytes=1 << 20)
    assert str(refused.value).startswith("this disk cannot hold 'tiny': it needs up to ")
    assert str(refused.value).endswith(", and 1.05 MB are free in /nowhere")


async def test_who_cannot_train_is_told_what_it_can_do(agree):
    memory = needs_of(SPEC, NodeConfig(device="cpu", threads=1, roles=("evaluate",))).host
    for size, role in ((memory, "evaluate"), (memory - 1, "relay")):
        with pytest.raises(ConfigError) as refused:
            await agree(Machine(size, size, "cpu"), yes=True, is_terminal=False)
        assert refused.value.hint == f"it can help with --role {role}"


async def test_a_person_is_asked_and_no_is_what_no_answer_means(agree, capsys):
    with pytest.raises(click.exceptions.Exit):
        await agree(TOO_SMALL, yes=False, is_terminal=True)
    said = capsys.readouterr().err
    assert "IN VAIN    this machine cannot train 'tiny': it needs " in said
    assert said.endswith("not joined; nothing was written\n")


@pytest.mark.parametrize(("yes", "is_terminal"), [(True, True), (False, False)])
async def test_yes_does_not_join_a_run_that_is_complete(agree, yes, is_terminal):
    with pytest.raises(ConfigError) as refused:
        await agree(LARGE, yes=yes, is_terminal=is_terminal, outlook=outlook(SPEC.outer.rounds - 1))
    assert str(refused.value).startswith("the run 'tiny' is complete")


async def test_the_preview_says_what_the_members_say(agree, capsys):
    assert await agree(LARGE, yes=True, is_terminal=False, outlook=outlook(11)) == []
    said = capsys.readouterr().err
    assert (
        "now        round 12, 3 members, 12 rounds are final, training loss 1.750; 7000 tokens/s together, "
        in said
    )
    assert "2.5 s of steps a round, at least 1 m 45 s left\n" in said
    assert "4 members, " in said, "with this node"
    assert "2.5 s a round as members say, " in said
    assert "assumed" not in said


async def test_what_fits_is_joined(agree):
    assert await agree(LARGE, yes=True, is_terminal=False) == []
    assert await agree(LARGE, yes=False, is_terminal=True) == [("Join?", True)]


@pytest.mark.parametrize(
    ("typed", "default", "answer"),
    [("\n", False, False), ("\n", True, True), ("y\n", False, True), ("n\n", True, False)],
)
async def test_an_empty_line_is_the_default(monkeypatch, capsys, typed, default, answer):
    ours, theirs = os.pipe()
    with os.fdopen(ours) as stdin, os.fdopen(theirs, "w") as keys:
        monkeypatch.setattr(running.sys, "stdin", stdin)
        keys.write(typed)
        keys.flush()
        assert await running._confirm("Join?", default=default) is answer
    assert capsys.readouterr().err == f"Join? [{'Y/n' if default else 'y/N'}]: "
