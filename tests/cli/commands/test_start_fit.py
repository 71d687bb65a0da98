"""A run that this machine can never train is not joined by `--yes`; a person may, who says so."""

import asyncio
import io
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from msgspec.structs import replace

from atoll.cli.node_commands import running
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.daemon import join_plan
from atoll.node.daemon.telemetry.run_outlook import RunOutlook
from atoll.node.runs.capacity.machine_fit import Machine
from atoll.node.runs.capacity.memory_model import Free, needs_of
from atoll.node.runs.invites import InviteOptions, invite_text
from atoll.node.runs.presets import preset
from atoll.protocols.errors import ConfigError
from atoll.protocols.identity import Identity
from atoll.protocols.run.run_spec import sign_run

OWN, OTHER = bytes(range(32)), bytes(32)
"""Secrets of the run's owner and of another node."""
OWNER = Identity(OWN)
SPEC = preset("tiny", OWNER.peer_id, 1, "synthetic:markov")
CONFIG = NodeConfig(device="cpu", threads=1)
TOO_SMALL, LARGE = (Machine(size, size, "cpu") for size in (1 << 20, 1 << 50))


def outlook(final):
    """What three members say."""
    return RunOutlook(
        members=3,
        idle=0,
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
        run=SimpleNamespace(spec=SPEC), config=CONFIG, room=None, invite=None,
        free=Free(1 << 50, 1 << 50), outlook=None, home=Home(Path("/nowhere")),
    )  # fmt: skip
    asked = []

    async def confirm(question, *, default):
        asked.append((question, default))
        return default

    async def on(machine, *, yes, is_terminal, outlook=None, disk_bytes=1 << 50):
        plan.outlook = outlook
        plan.free = Free(1 << 50, disk_bytes)
        monkeypatch.setattr(running, "measure_machine", lambda *_: machine)
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


EVALUATES, RELAYS = (needs_of(SPEC, replace(CONFIG, roles=(role,))).host for role in ("evaluate", "relay"))


async def planned(tmp_path, monkeypatch, machine, me=OTHER, **flags):
    """What `start INVITE` reads on this machine."""
    monkeypatch.setattr(running, "measure_machine", lambda *_: machine)
    monkeypatch.setattr(join_plan.os, "urandom", lambda count: me)
    run_file = sign_run(SPEC, OWNER)
    link = invite_text(SPEC, OWNER, (), 1.0, options=InviteOptions(run_file=run_file))
    config = replace(CONFIG, listen=("/ip4/127.0.0.1/tcp/0",), **flags)
    async with asyncio.TaskGroup() as group:
        read = partial(
            join_plan.read_plan, Home(tmp_path / "home"), link=link, wanted=None, unix_s=1.0, group=group,
            report=print,
        )  # fmt: skip
        return await running._read_able_plan(read, config)


@pytest.mark.parametrize(
    ("size", "me", "flags", "roles"),
    [
        (1 << 50, OTHER, {}, ()),
        (EVALUATES, OTHER, {}, ("evaluate",)),
        (EVALUATES, OTHER, {"roles": ("train",)}, ("train",)),
        (EVALUATES, OTHER, {"roles": ("seed",)}, ("seed",)),
        (EVALUATES, OWN, {}, ("evaluate",)),
        (EVALUATES - 1, OTHER, {}, ("relay",)),
        (EVALUATES - 1, OWN, {}, ()),  # round 0 is of its model
        (EVALUATES - 1, OTHER, {"relay_only": True}, ()),
        (RELAYS - 1, OTHER, {}, ()),
    ],
)
async def test_who_names_no_role_takes_one_that_its_machine_can_do(
    tmp_path, monkeypatch, capsys, size, me, flags, roles
):
    plan = await planned(tmp_path, monkeypatch, Machine(size, size, "cpu"), me, **flags)
    assert plan.config.roles == roles
    assert plan.config.work.relays == ("relay" in roles)
    said = capsys.readouterr().err
    if roles == flags.get("roles", ()):
        assert said == ""
    else:
        assert said.startswith("this machine cannot train 'tiny': it needs ")
        assert said.endswith(f" are here; it takes the role {roles[0]} (--role train insists)\n")
    assert list(tmp_path.iterdir()) == []


async def test_the_role_is_of_one_start_and_with_more_memory_the_node_trains(tmp_path, monkeypatch):
    small = await planned(tmp_path, monkeypatch, Machine(EVALUATES, EVALUATES, "cpu"))
    assert small.config.roles == ("evaluate",)
    small.home.make()
    small.store()
    later = await planned(tmp_path, monkeypatch, LARGE)
    assert not later.is_new
    assert later.config.work.trains


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


async def test_the_preview_says_what_holds_members_that_lie(agree, capsys):
    await agree(LARGE, yes=True, is_terminal=False)
    assert "\nliars      no rule against bad updates\n" in capsys.readouterr().err


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
