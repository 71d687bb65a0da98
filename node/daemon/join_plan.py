"""Phase 1 of `node start`: read once what the node is built from. Nothing is written before the user agreed.

An identity, a port, a run or an invite that is not in the home yet stays in memory until `JoinPlan.store`.
"""

import asyncio
import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from atoll.node.config.guest import read_guest
from atoll.node.config.home import Home
from atoll.node.config.node_config import MAX_SEEDS, NodeConfig
from atoll.node.daemon.assets.feed_recovery import LostFeed, read_mark
from atoll.node.daemon.assets.lost_ledger import has_worked
from atoll.node.daemon.host_factory import ListenPlan, NodeHost, make_host, plan_listen
from atoll.node.daemon.telemetry.run_outlook import RunOutlook, ask_outlook
from atoll.node.guest.sensors import MachineFiles, check_sensors
from atoll.node.runs.capacity.free_resources import measure_free, offer_of
from atoll.node.runs.capacity.join_preview import with_average
from atoll.node.runs.capacity.memory_model import Free
from atoll.node.runs.installed_parts import check_installed
from atoll.node.runs.invites import check_admission, load_invite, store_invite
from atoll.node.runs.public_runs import client_of, find_joinable, parse_wanted
from atoll.node.runs.run_files import (
    FoundRun,
    check_name,
    fetch_until_found,
    find_run,
    keep_text_path,
    parse_run,
    run_with_id,
    runs_of,
    store_run,
    text_path,
)
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.host.interface import PeerAddress
from atoll.p2p.membership.address_book import is_dns_seed, parse_seed
from atoll.p2p.swarm.invite_fetch import fetch_invite
from atoll.p2p.system import key_file
from atoll.p2p.system.atomic_files import write_whole
from atoll.protocols.data.file_source import FILE, no_text_at, parse_file_source
from atoll.protocols.errors import ConfigError, DecodeError, LocalFault, PeerFault, Unreachable, counted
from atoll.protocols.identity import Identity
from atoll.protocols.ids import short
from atoll.protocols.local.control_messages import Room
from atoll.protocols.run.invite import Invite, decode_invite, invite_id, link_again, read_invite, read_short

Report = Callable[[str], None]
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinPlan:
    """Everything that a node of one run is built from."""

    home: Home
    config: NodeConfig
    """With the seeds of the invite; `exchange_on` is decided."""
    identity: Identity
    new_seed: bytes
    """The secret of an identity that is not in the home yet; empty for one that is."""
    listen: ListenPlan
    host: NodeHost
    """Started already where the run was fetched."""
    run: FoundRun
    invite: Invite | None
    """The invite that this home joined or joins the run with; None for a run found here or in the DHT."""
    is_new: bool
    """Whether the user has not agreed to join this run, or by this invite, yet."""
    new_link: str
    """The text of an invite that is new; empty without one."""
    members: tuple[PeerAddress, ...]
    """Peers that the DHT named as members of the run, unverified."""
    restored: LostFeed | None
    """What must come back from the others before this node writes; None if its ledger is its own."""
    free: Free
    """The machine's free resources."""
    room: Room | None
    """How many experts of each layer this node offers to train; None if all members train all."""
    outlook: RunOutlook | None
    """What the members of a run that is new say of it; None where nobody was asked, or answers."""

    def check_text(self) -> None:
        """Raise ConfigError if the run's text is a file of each member, and none is here.

        What is in it the worker finds out, seconds later: until then others may have been invited.
        """
        source = self.run.spec.data.source
        if source.startswith(FILE) and self.config.work.reads_text:
            path = self.config.data or parse_file_source(source).name
            if not (glob.has_magic(path) or Path(path).expanduser().exists()):
                raise no_text_at(path)

    def store(self) -> None:
        """Write what the home lacks. The caller holds the home's lock. Raises ConfigError, LocalFault."""
        store_run(self.home, self.run)
        if self.new_seed and key_file.store(self.home.identity, self.new_seed).peer_id != self.identity.peer_id:
            raise LocalFault("another program made an identity in this home meanwhile", hint="start again")
        if self.listen.picked_port:
            write_whole(self.home.port, b"%d\n" % self.listen.picked_port)
        if self.config.data and self.run.spec.data.source.startswith(FILE):
            keep_text_path(self.home, self.run.spec.id, self.config.data)
        if self.new_link:
            store_invite(self.home, self.run.spec.id, self.new_link)


async def read_plan(
    home: Home,
    config: NodeConfig,
    *,
    link: str | None,
    wanted: str | None,
    unix_s: float,
    group: asyncio.TaskGroup,
    report: Report,
    free: Free | None = None,
) -> JoinPlan:
    """Read the plan for the run of an invite (`link`), or for `wanted`: a run of this home (see `find_run`), else
    of the DHT (see `parse_wanted`).

    `group` owns the host's task. `free`: what there was before a worker began early. Raises ConfigError where the
    user must change something, LocalFault, DiskFault.
    """
    check_sensors(read_guest(config.guest), MachineFiles())
    new_seed = b"" if home.identity.exists() else os.urandom(key_file.SEED_BYTES)
    identity = Identity(new_seed) if new_seed else key_file.load(home.identity)
    listen = plan_listen(config.listen, config.port, home.port)
    host = NodeHost(make_host(listen.maddrs, config, identity), group)
    if link is not None:
        link = await _long_link(home, link, host, report)
        choice = await _invited(home, link, unix_s, host, report)
    else:
        choice = await _named(home, wanted, host, lambda: client_of(home, config, host.host, identity), report)
    spec = choice.run.spec
    if spec.objective or spec.model.plugin:
        check_installed(spec, config.work)
    restored = read_mark(home.run(spec.id), identity.peer_id)
    if choice.is_new or not has_worked(home.run(spec.id), identity.peer_id, restored):
        check_admission(spec, None if new_seed else identity.peer_id, choice.invite, unix_s)
    free = free or measure_free(home.root, config.device, config.guest.gpu_memory)
    room, config = offer_of(spec, with_average(spec, config, free), free)
    is_asked = choice.is_new and host.is_up
    outlook = await ask_outlook(host.host, spec, identity, _askable(choice)) if is_asked else None
    return JoinPlan(
        home=home,
        config=replace(_with_seeds(config, choice.invite), data=text_path(home, spec.id, config.data)),
        identity=identity,
        new_seed=new_seed,
        listen=listen,
        host=host,
        run=choice.run,
        invite=choice.invite,
        is_new=choice.is_new,
        new_link=link if link is not None and choice.is_new else "",
        members=choice.members,
        restored=restored,
        free=free,
        room=room,
        outlook=outlook,
    )


class _Choice(NamedTuple):
    """A run, and the invite to it."""

    run: FoundRun
    invite: Invite | None
    is_new: bool
    """The user has not agreed to this invite, or to a run of the DHT, yet."""
    members: tuple[PeerAddress, ...] = ()


async def _named(
    home: Home, wanted: str | None, host: NodeHost, dht: Callable[[], Dht], report: Report
) -> _Choice:
    """The run of this home that is `wanted`, else the public run. Raises Unreachable too, if the DHT has none."""
    public = None if wanted is None or home.run_file(wanted).is_file() else parse_wanted(wanted)
    run = None if public is None else next((run for run in runs_of(home) if public.is_met_by(run.spec)), None)
    if public is not None and run is None:
        client = dht()
        report(f"asking the DHT for {wanted} …")
        await host.start()
        data, members = await find_joinable(client, host.host, public)
        run = parse_run(home, data)
        check_name(home, run)
        return _Choice(run, None, is_new=True, members=members)
    run = run or find_run(home, wanted)
    return _Choice(run, load_invite(home, run.spec.id), is_new=False)


async def _invited(home: Home, link: str, unix_s: float, host: NodeHost, report: Report) -> _Choice:
    """The run of `link`: of this home if it joined with this invite before, even where the invite has expired."""
    invite = _decoded(lambda: read_invite(link))
    known = run_with_id(home, invite.run)
    if known is not None and load_invite(home, invite.run) == invite:
        return _Choice(known, invite, is_new=False)
    _decoded(lambda: decode_invite(link, unix_s))
    return _Choice(known or await _invited_run(home, invite, host, report), invite, is_new=True)


async def _long_link(home: Home, link: str, host: NodeHost, report: Report) -> str:
    """The link of version 1 for `link`: of this home if it joined with it before, else of the node that made it.

    Raises Unreachable if that node cannot be asked, and ConfigError if it gives the invite no more.
    """
    wanted = _decoded(lambda: read_short(link))
    if wanted is None:
        return link
    for known in filter(None, (load_invite(home, run.spec.id) for run in runs_of(home))):
        if invite_id(known) == wanted.id:
            return link_again(known)
    report(f"asking {short(wanted.peer)} for the invite …")
    await host.start()
    try:
        found = await fetch_invite(host.host, wanted)
    except (Unreachable, PeerFault) as error:
        host.check()
        raise Unreachable(
            f"a short invite needs the node that made it, {short(wanted.peer)}: {error}",
            hint="try again when it runs, or ask for a long invite (`atoll invite create --embed`)",
        ) from error
    if not found:
        raise ConfigError(
            f"{short(wanted.peer)} gives this invite to nobody any more: it has expired or was revoked",
            hint="ask for a new one",
        )
    return found


def _askable(choice: _Choice) -> list[PeerAddress]:
    """Peers that may know how the run is doing. Names in DNS are left out: their peers are not known here."""
    seeds = map(parse_seed, choice.invite.seed_texts if choice.invite else ())
    return [*choice.members, *(seed for seed in seeds if not is_dns_seed(seed))]


def _decoded(read: Callable[[], Read]) -> Read:
    try:
        return read()
    except DecodeError as error:
        raise ConfigError(str(error), hint=error.hint) from error


async def _invited_run(home: Home, invite: Invite, host: NodeHost, report: Report) -> FoundRun:
    """The run inside the invite, or of its seeds. Raises ConfigError for another one, or if its name is taken."""
    found = parse_run(home, invite.run_file or await _fetch(invite, host, report))
    if found.spec.id != invite.run:
        raise ConfigError("the run inside the invite is not the one that it names", hint="ask for another invite")
    check_name(home, found)
    return found


async def _fetch(invite: Invite, host: NodeHost, report: Report) -> bytes:
    seeds = [parse_seed(seed) for seed in invite.seed_texts]
    if not seeds:
        raise ConfigError("the invite names no node that could give its run", hint="ask for another invite")

    def report_retry(line: str) -> None:
        host.check()  # a host that has failed reaches no seed, however often it is tried
        report(line)

    report(f"asking {counted(len(invite.seeds), 'seed')} for the run …")
    await host.start()
    return await fetch_until_found(host.host, seeds, invite.run, report_retry)


def _with_seeds(config: NodeConfig, invite: Invite | None) -> NodeConfig:
    """The user's seeds, then those of the invite."""
    seeds = tuple(dict.fromkeys((*config.seeds, *(invite.seed_texts if invite else ()))))
    return msgspec.structs.replace(config, seeds=seeds[:MAX_SEEDS])
