"""Control traffic of a virtual run over real gossip: what a node sends in a round, and how long a record takes."""

import time
from typing import NamedTuple

from atoll_bench.simulator.mesh import Mesh
from atoll_bench.simulator.world import Setting, World

TRAIN_S = 20.0
"""A round's steps on the slowest node: short rounds, because each costs CPU minutes with thousands of nodes."""
FIRST = 2
"""The first round that counts: push trees are known by then, and all members train."""


class Traffic(NamedTuple):
    """What all nodes of a run sent from round FIRST on, and what became final."""

    nodes: int
    trainers: int
    rounds: int
    """Rounds that were counted."""
    finals: int
    """Rounds that are final on all members at the end."""
    records: float
    """Entries and registers of a round."""
    sent_bytes: dict[str, float]
    """By kind of message, of a node in a round."""
    messages: dict[str, float]
    p50_s: float
    """Virtual seconds from the birth of a record to its arrival at the last node; half of the records."""
    p99_s: float
    lost: int
    """Records that were counted and did not reach all nodes."""
    copies: float
    """How often a node gets a record."""
    cpu_s: float

    @property
    def control_bytes(self) -> float:
        """All that a node sends in a round, but for payloads."""
        return sum(self.sent_bytes.values())

    @property
    def control_messages(self) -> float:
        """The number of messages that carry it."""
        return sum(self.messages.values())

    @property
    def round_gossip_bytes(self) -> float:
        """Bytes of records and of their ids that a node sends in a round."""
        return sum(size for kind, size in self.sent_bytes.items() if kind.startswith("gossip."))

    @property
    def gossip_bytes(self) -> float:
        """The same per record of the round."""
        return self.round_gossip_bytes / max(1.0, self.records)

    @property
    def gossip_messages(self) -> float:
        """Notices of gossip that a node sends in a round, per record of the round."""
        many = sum(many for kind, many in self.messages.items() if kind.startswith("gossip."))
        return many / max(1.0, self.records)


def measure_traffic(nodes: int, trainers: int, minutes: float, seed: int) -> Traffic:
    """Run `trainers` members among `nodes` nodes without faults, and count."""
    began = time.process_time()
    setting = Setting(seed=seed, nodes=trainers, minutes=minutes, train_s=TRAIN_S, followers=nodes - trainers)
    world = World(setting)
    world.begin()
    world.clock.run(60.0 * minutes)
    assert world.mesh is not None
    finals = 1 + min(member.worker.applied for member in world.members)
    return _counted(world.mesh, nodes, trainers, finals, time.process_time() - began)


def _counted(mesh: Mesh, nodes: int, trainers: int, finals: int, cpu_s: float) -> Traffic:
    newest = max(mesh.marks)
    first, last = mesh.marks[min(FIRST, newest)], mesh.marks[newest]
    rounds = max(1, newest - FIRST)
    share = 1 / (rounds * nodes)
    ping_bytes, pings = mesh.pings(last.at - first.at)
    sent = {"ping": ping_bytes} | dict(last.sent_bytes - first.sent_bytes)
    messages = {"ping": pings} | dict(last.messages - first.messages)
    records = (last.records - first.records).total()
    spread = mesh.dissemination(first.at, last.at) or [float("inf")]
    pushed = sum(messages.get(f"gossip.{topic}", 0) for topic in ("entry", "register"))
    return Traffic(
        nodes=nodes,
        trainers=trainers,
        rounds=rounds,
        finals=finals,
        records=records / rounds,
        sent_bytes={kind: size * share for kind, size in sorted(sent.items())},
        messages={kind: many * share for kind, many in sorted(messages.items())},
        p50_s=spread[len(spread) // 2],
        p99_s=spread[len(spread) * 99 // 100],
        lost=mesh.lost(first.at, last.at),
        copies=pushed / max(1, records) / (nodes - 1),
        cpu_s=cpu_s,
    )


def traffic_lines(traffic: Traffic) -> list[str]:
    """The figures, for people."""
    kinds = [
        f"  {kind:16} {size:12,.0f} B {traffic.messages[kind]:10,.1f} messages"
        for kind, size in traffic.sent_bytes.items()
    ]
    return [
        f"{traffic.nodes} nodes, {traffic.trainers} train; {traffic.finals} rounds final on all, "
        f"{traffic.rounds} counted; {traffic.cpu_s:.0f} CPU s",
        f"sent per node and round: {traffic.control_bytes:,.0f} B in {traffic.control_messages:,.0f} messages",
        *kinds,
        f"of gossip per record ({traffic.records:,.0f} a round): {traffic.gossip_bytes:,.0f} B in "
        f"{traffic.gossip_messages:.2f} messages; {traffic.copies:.2f} copies",
        f"a record reaches all nodes after {traffic.p50_s:.2f} s (p50), {traffic.p99_s:.2f} s (p99); "
        f"{traffic.lost} did not",
    ]
