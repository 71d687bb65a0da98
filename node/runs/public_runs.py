"""Public runs in the DHT: which there are, and which one a NAME@OWNER or an id means.

Names can be taken by anybody, so a name counts only with the whole PeerID of its owner.
"""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig
from atoll.node.runs.invites import load_invite
from atoll.node.runs.presets import NAMES, model_of
from atoll.node.runs.run_files import runs_of
from atoll.p2p.discovery.dht import Dht
from atoll.p2p.discovery.dht_records import PublicRun
from atoll.p2p.discovery.dht_role import Part, Role
from atoll.p2p.host.interface import Host, PeerAddress
from atoll.p2p.membership.address_book import is_dns_seed, parse_seed
from atoll.p2p.swarm.run_fetch import fetch_run
from atoll.protocols.errors import ConfigError, DecodeError, Unreachable
from atoll.protocols.identity import Identity
from atoll.protocols.ids import DIGEST_BYTES, PeerId, RunId, peer_bytes
from atoll.protocols.run.run_spec import RunSpec

FIND_S = 30.0
"""Deadline of a search, in seconds: a run that was announced a moment ago may take some of it."""
PAUSE_S = 1.0
SHOWN_MAX = 64
_ID = re.compile(r"[0-9a-f]{8,64}")
"""A run id or its start; a shorter start is too easily made by somebody else."""


class WantedRun(NamedTuple):
    """What a user calls a run: NAME@OWNER, an id, or the start of one."""

    name: str = ""
    owner: str = ""
    id_start: str = ""

    def __str__(self) -> str:
        return self.id_start or f"{self.name}@{self.owner}"

    def is_met_by(self, spec: RunSpec) -> bool:
        """Whether `spec`, whose signature was checked, may be meant."""
        if self.id_start:
            return spec.id.hex().startswith(self.id_start)
        return (spec.name, spec.owner) == (self.name, self.owner)


JoinableRun = tuple[bytes, tuple[PeerAddress, ...]]
"""A verified run file, and peers that announce themselves as members."""


def parse_wanted(text: str) -> WantedRun | None:
    """What `text` calls a run; None if it is neither. Raises ConfigError for an OWNER that is no PeerID."""
    name, at, owner = text.rpartition("@")
    if not at:
        return WantedRun(id_start=text.lower()) if _ID.fullmatch(text.lower()) else None
    try:
        peer_bytes(PeerId(owner))
    except DecodeError as error:
        raise ConfigError(f"{owner!r} is no PeerID: {error}", hint="give the whole PeerID of the owner") from error
    return WantedRun(name, owner)


def client_of(home: Home, config: NodeConfig, host: Host, identity: Identity) -> Dht:
    """A client of the DHT; it begins at the configured peers, then seeds, those of this home's invites too.

    Raises ConfigError if there are none, or if this node hides its address, which servers and members would see.
    """
    if config.relay_only:
        raise ConfigError("relay_only cannot look for runs in the DHT", hint="join by an invite")
    invites = [load_invite(home, run.spec.id) for run in runs_of(home)]
    seeds = [*config.dht_bootstrap, *config.seeds, *(s for invite in invites if invite for s in invite.seed_texts)]
    found = [seed for seed in map(parse_seed, dict.fromkeys(seeds)) if not is_dns_seed(seed)]
    if not found:
        hint = "name one with --dht-bootstrap …/p2p/PEERID, or a seed of any run"
        raise ConfigError("no peer is known that serves the DHT", hint=hint)
    dht = Dht(host, identity, found, rng=random.Random())
    dht.play(Part(Role.CLIENT, "looking for a run"))
    return dht


async def public_runs(dht: Dht) -> dict[RunId, PublicRun]:
    """The runs that the DHT lists. Raises Unreachable if no server answers within FIND_S."""
    try:
        async with asyncio.timeout(FIND_S):
            is_known = await dht.meet()
            while not is_known:
                await asyncio.sleep(PAUSE_S)
                is_known = await dht.meet()
            return await dht.runs()
    except TimeoutError as error:
        raise Unreachable(f"no DHT server answered in {FIND_S:.0f} s", hint="check --dht-bootstrap") from error


def matching(words: Sequence[str], runs: Mapping[RunId, PublicRun]) -> list[PublicRun]:
    """Runs of which name, preset, owner or id have every word, the newest first; at most SHOWN_MAX."""

    def is_match(spec: RunSpec) -> bool:
        text = f"{spec.name} {preset_of(spec)} {spec.owner} {spec.id.hex()}".lower()
        return all(word.lower() in text for word in words)

    return sorted((run for run in runs.values() if is_match(run.spec)), key=lambda run: run.age_s)[:SHOWN_MAX]


def preset_of(spec: RunSpec) -> str:
    """Name of the preset whose model the run has; empty for a model of its own."""
    return next((name for name in NAMES if model_of(name) == spec.model), "")


async def find_joinable(dht: Dht, host: Host, wanted: WantedRun) -> JoinableRun:
    """The one run that is meant, from the list or, by its whole id, from a member.

    Raises ConfigError if several are, Unreachable if none is found within FIND_S and one more try.
    """
    deadline = asyncio.get_running_loop().time() + FIND_S
    while isinstance(found := await _search(dht, host, wanted), str):
        if asyncio.get_running_loop().time() > deadline:
            raise Unreachable(f"{wanted} {found}", hint="see `atoll run find`, or ask its owner for an invite")
        await asyncio.sleep(PAUSE_S)
    return found


async def _search(dht: Dht, host: Host, wanted: WantedRun) -> JoinableRun | str:
    """The run, or why it was not found."""
    listed = [run for run in (await public_runs(dht)).values() if wanted.is_met_by(run.spec)]
    if len(listed) > 1:
        ids = ", ".join(run.spec.id.hex() for run in listed[:4])
        raise ConfigError(f"{wanted} means {len(listed)} public runs: {ids}", hint="give the whole id of one")
    is_whole = len(wanted.id_start) == 2 * DIGEST_BYTES
    run = listed[0].spec.id if listed else RunId(bytes.fromhex(wanted.id_start)) if is_whole else None
    members = tuple(await dht.find(run)) if run else ()
    if run is None or not members:
        return "has no member in the DHT" if listed else "is not in the DHT"
    try:
        return await fetch_run(host, members, run), members
    except Unreachable as error:
        # All members may be behind routers, which only a node of the run can cross.
        return (listed[0].run_file, members) if listed else f"was not fetched: {error}"
