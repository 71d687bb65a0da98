"""What `start` does: asks whether to join, then runs the daemon in the foreground, with what it shows meanwhile.

It is apart from the command's options because the daemon's modules take half a second, and `--help` needs none.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import click
from msgspec.structs import replace

from atoll.cli.formatting import size
from atoll.cli.live_panel import Words, show_cursor, shown
from atoll.cli.preview_lines import preview_lines
from atoll.node.config.home import Home, hold_lock
from atoll.node.config.node_config import NodeConfig
from atoll.node.config.roles import Role
from atoll.node.daemon.app import Daemon
from atoll.node.daemon.host_factory import host_group
from atoll.node.daemon.join_plan import JoinPlan, read_plan
from atoll.node.daemon.telemetry.logfile import log_handler
from atoll.node.ipc.chain_mark import ChainMark, news_of
from atoll.node.ipc.worker_pipe import EarlyWorker
from atoll.node.runs.capacity.join_preview import preview_of
from atoll.node.runs.capacity.machine_fit import (
    able_role,
    largest,
    measure_machine,
    needs_here,
    presets_here,
    shortage,
)
from atoll.node.runs.given_invites import ShownInvite
from atoll.node.runs.invites import own_seeds, reach_rank
from atoll.node.runs.run_files import unread_text
from atoll.node.service.notify import notice_from, notifying
from atoll.p2p.system.stop_signals import StopSignals
from atoll.protocols.errors import ConfigError
from atoll.protocols.local.control_messages import Status

log = logging.getLogger(__name__)


class ReadPlan(Protocol):
    """`read_plan` with all but the config."""

    async def __call__(self, *, config: NodeConfig) -> JoinPlan:
        """Return the plan of a node with this config."""


async def run_node(
    home: Home,
    config: NodeConfig,
    link: str | None,
    wanted: str | None,
    *,
    on_up: Callable[[], None] | None,
    worker: EarlyWorker,
    lock: ExitStack | None,
    **options: bool,
) -> None:
    """The three phases: read the plan, build the daemon, run it, until it is stopped. One loop serves all of them.

    `on_up` is called when the node is up. `worker`: what may have begun already; the caller ends it.
    `lock` takes the lock of a home that is made here; None: the caller holds it.
    Raises AtollError, click's Abort and Exit.
    """
    this_task = asyncio.current_task()
    assert this_task is not None
    signals = StopSignals(this_task.cancel, show_cursor)
    # With `on_up` the node leaves its terminal: the command that started it listens until it is up.
    with notifying(notice_from(os.environ, os.getpid(), until_ready=on_up is not None)) as tell_ready:

        def ready() -> None:
            if on_up is not None:
                on_up()
            tell_ready()

        await _run(home, config, link, wanted, on_up=ready, signals=signals, worker=worker, lock=lock, **options)


async def _run(
    home: Home,
    config: NodeConfig,
    link: str | None,
    wanted: str | None,
    *,
    on_up: Callable[[], None],
    signals: StopSignals,
    worker: EarlyWorker,
    lock: ExitStack | None,
    yes: bool,
    as_json: bool,
    plain: bool,
    opens: bool,
) -> None:
    async with host_group() as group:
        plan = await _read_able_plan(
            partial(
                read_plan,
                home,
                link=link,
                wanted=wanted,
                unix_s=time.time(),
                group=group,
                report=_report,
                free=worker.free,
            ),
            config,
        )
        if plan.is_new or not plan.config.work.has_model:
            await worker.end()  # of another run, which need not wait for an answer, or of another role
        if plan.is_new:
            await _agree(plan, yes=yes)
        plan.check_text()
        if unread := unread_text(plan.run.spec, plan.config.data):
            _report(unread)
        if lock is not None:
            lock.enter_context(hold_lock(home))
        plan.store()
        _begin_log(home, plan.config)
        folder = home.run(plan.run.spec.id)
        if (first := ChainMark(folder).first()) is not None:
            _report(news_of(folder, first))
        daemon = Daemon(plan, worker=worker, report=_report)
        signals.stop = daemon.stop
        log.info("node starts in run %s (%s)", plan.run.spec.name, plan.run.spec.id.hex())
        with shown(home, as_json=as_json, plain=plain, words=_words(plan), opens=opens):
            await daemon.run(on_up)
        log.info("node ended in good order")


async def _read_able_plan(read: ReadPlan, config: NodeConfig) -> JoinPlan:
    """The plan; with a role that this machine can take where it cannot train, and its operator named none.

    The role is of this start alone: a later one, with more memory, trains.
    """
    plan = await read(config=config)
    role = _lesser_role(plan)
    if role is None:
        return plan
    # Read again, because the role decides what the transport host is: one that relays is another one.
    await plan.host.stop()
    return await read(config=replace(config, roles=(role,)))


def _lesser_role(plan: JoinPlan) -> Role | None:
    """The role to take instead of training, and the user is told; None: the plan stays as it is."""
    config, spec = plan.config, plan.run.spec
    if config.roles:
        return None
    machine = measure_machine(config.device, config.guest.gpu_memory)
    never = shortage(needs_here(spec, config, machine), machine)
    role = able_role(spec, config, machine) if never else None
    # Round 0 is decided by the owner's model. And who wants to be relayed alone relays for nobody.
    if role is None or (role == "relay" and (spec.owner == plan.identity.peer_id or config.relay_only)):
        return None
    _report(f"this machine cannot train {spec.name!r}: {never}; it takes the role {role} (--role train insists)")
    return role


def _report(line: str) -> None:
    click.echo(line, err=True)


async def _agree(plan: JoinPlan, *, yes: bool) -> None:
    """Show what the run costs, and ask. Raises Exit for no, and ConfigError where nobody can answer.

    `yes` does not join where nothing can be trained: that needs an answer of its own.
    """
    spec, seen = plan.run.spec, plan.outlook
    members, round_s = (seen.members + 1, seen.pace_s or seen.round_s) if seen else (None, None)
    costs = preview_of(spec, plan.config, plan.room, members, round_s)
    lines = preview_lines(
        spec, plan.invite, costs, outlook=seen, free=plan.free, config=plan.config, unix_s=time.time()
    )
    click.echo("\n".join(lines), err=True)
    never, instead = _obstacle(plan, costs.disk_bytes)
    if never and (yes or not sys.stdin.isatty()):
        raise ConfigError(never, hint=instead)
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("nobody is here to agree to this: stdin is no terminal", hint="give --yes to join")
    if never:
        _report(f"IN VAIN    {never}; {instead}")
    if not await _confirm("Join all the same?" if never else "Join?", default=not never):
        _report("not joined; nothing was written")
        raise click.exceptions.Exit(1)


def _obstacle(plan: JoinPlan, disk_bytes: int) -> tuple[str, str]:
    """Why this machine would train nothing, and what to do instead; empty if it would."""
    spec, machine = plan.run.spec, measure_machine(plan.config.device, plan.config.guest.gpu_memory)
    if plan.outlook and plan.outlook.is_complete(spec):
        done = f"the run {spec.name!r} is complete: its owner says that no round is left to train"
        return done, "ask one of them for the model: `atoll model export hf`"
    never = shortage(needs_here(spec, plan.config, machine), machine)
    if not never and disk_bytes > plan.free.disk_bytes:
        full = f"it needs up to {size(disk_bytes)}, and {size(plan.free.disk_bytes)} are free in {plan.home.root}"
        return f"this disk cannot hold {spec.name!r}: {full}", "make room, or choose another place with --home DIR"
    if not never:
        return "", ""
    if not plan.config.work.trains:
        return f"this machine cannot hold {spec.name!r}: {never}", "it can help with --role relay"
    able, fitting = able_role(spec, plan.config, machine), largest(presets_here(plan.config, machine))
    advice = f"it can help with --role {able}" if able else "join from a larger machine"
    advice += f"; the largest preset that fits is {fitting}" if fitting else ""
    return f"this machine cannot train {spec.name!r}: {never}", advice


async def _confirm(question: str, *, default: bool) -> bool:
    """`click.confirm` that leaves the loop running: the host may be up, and signals must be seen."""
    while True:
        click.echo(f"{question} [{'Y/n' if default else 'y/N'}]: ", nl=False, err=True)
        await _stdin_ready()
        line = sys.stdin.readline()
        if not line:
            raise click.Abort
        answer = line.strip().lower()
        if not answer:
            return default
        if answer in ("y", "yes"):
            return True
        if answer in ("n", "no"):
            return False
        click.echo("Error: invalid input", err=True)


async def _stdin_ready() -> None:
    """Wait until the terminal has a line."""
    loop, ready, blocking = asyncio.get_running_loop(), asyncio.Event(), os.get_blocking(sys.stdin.fileno())
    loop.add_reader(sys.stdin, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sys.stdin)
        os.set_blocking(sys.stdin.fileno(), blocking)  # libuv changed it, for all who share the terminal


def _words(plan: JoinPlan) -> Words:
    """How others join through this node: an invite, where one of its making admits them; else nothing.

    An invite that holds a permit is a secret: it is shown on terminals and stays out of log files.
    """
    spec, me = plan.run.spec, plan.identity
    invite = ShownInvite(plan.home, spec, me)

    def words(now: Status) -> list[str]:
        if now.final >= spec.outer.rounds - 1:
            return []  # nobody joins a run that is complete
        if spec.owner != me.peer_id and spec.admission.mode != "open":
            return []  # the owner's invites alone admit
        if spec.admission.mode == "invite" and not sys.stdout.isatty():
            return ["others join with an invite: `atoll invite`"]
        seeds = own_seeds(now.addresses, me.peer_id, plan.config.seeds)
        where = ("", "", " in this network", " on this machine")[min(map(reach_rank, seeds))]
        return [f"others join{where} with: atoll start {invite.link(seeds, time.time())}"]

    return words


def _begin_log(home: Home, config: NodeConfig) -> None:
    """Everything to the file; warnings to stderr too where nobody paints a panel."""
    root = logging.getLogger()
    if root.handlers:  # this process logs already
        return
    root.setLevel(config.log.upper())
    root.addHandler(log_handler(home.log))
    if not sys.stdout.isatty():
        stderr = logging.StreamHandler()
        stderr.setLevel(logging.WARNING)
        stderr.addFilter(
            lambda record: record.levelno < logging.CRITICAL
        )  # a bug, which Python itself prints there
        stderr.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        root.addHandler(stderr)
