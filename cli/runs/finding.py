"""`run find`: the public runs that the DHT lists. It asks through a libp2p host of its own, and starts no node."""

import asyncio
import os
from typing import Any

import click

from atoll.cli.formatting import print_json, print_table, span
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.daemon.host_factory import NodeHost, host_group
from atoll.node.runs.public_runs import client_of, matching, preset_of, public_runs
from atoll.p2p.discovery.dht import WANTED_RECORDS, Dht
from atoll.p2p.discovery.dht_records import PublicRun
from atoll.p2p.transports.p2pd.p2pd_host import P2pdHost
from atoll.protocols.identity import Identity

_ASKS_AT_ONCE = 4


def print_public_runs(
    words: tuple[str, ...], home: Home, dht_bootstrap: tuple[str, ...], *, as_json: bool
) -> None:
    """Print the public runs whose name, preset, owner or id have all words. Raises ConfigError."""
    config = load_config(home.config_toml, {"dht_bootstrap": dht_bootstrap})
    rows = asyncio.run(_find(words, home, config))
    if as_json:
        return print_json({"runs": rows})
    print_table(("name", "id", "parameters", "members", "age", "owner"), map(_cells, rows))
    click.echo("join one with: atoll start NAME@OWNER, or its id" if rows else "no such public run", err=True)


async def _find(words: tuple[str, ...], home: Home, config: NodeConfig) -> list[dict[str, Any]]:
    identity = Identity(os.urandom(32))  # nobody shall see which node looks for what
    async with host_group() as group:
        host = NodeHost(P2pdHost(identity), group)
        dht = client_of(home, config, host.host, identity)
        await host.start()
        runs = matching(words, await public_runs(dht))
        slots = asyncio.Semaphore(_ASKS_AT_ONCE)
        rows = await asyncio.gather(*(_row(run, dht, slots) for run in runs))
        await host.stop()
    return rows


async def _row(run: PublicRun, dht: Dht, slots: asyncio.Semaphore) -> dict[str, Any]:
    async with slots:
        members = len(await dht.find(run.spec.id))
    return {
        "run": run.spec.id.hex(),
        "name": run.spec.name,
        "owner": run.spec.owner,
        "preset": preset_of(run.spec),
        "parameters": run.spec.model.parameters,
        "members_claimed": min(members, WANTED_RECORDS),
        "age_claimed_s": run.age_s,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    members, age = row["members_claimed"], span(row["age_claimed_s"])
    more = "+" if members == WANTED_RECORDS else ""
    return row["name"], row["run"][:16], f"{row['parameters']:,}", f"{members}{more}", age, row["owner"]
