"""`bench scale`: what a node sends in a round, but for payloads, in swarms of 100 and of 2,000 nodes.

Virtual runs over the product's gossip (`atoll_bench.simulator.mesh`), without faults. Every node reads every
record, so where all nodes train the traffic of a node grows with their number, whatever carries the records. The
bars are therefore about swarms of which equally many train, and about traffic per record.
"""

import asyncio
from collections.abc import Callable

from atoll_bench.report import Bar, Row, row
from atoll_bench.simulator.traffic import Traffic, measure_traffic, traffic_lines

SMALL, LARGE, TRAINERS = 100, 2000, 6
QUICK_SMALL, QUICK_LARGE, QUICK_TRAINERS = 20, 40, 3
MINUTES, QUICK_MINUTES = 2.5, 1.5
ALL_TRAIN = 2
"""In the runs of which all nodes train there are so many times as many trainers, and twice as many again."""
SEED = 1
FLAT = Bar("<=", 1.3)
NONE = Bar("<=", 0)
SOME = Bar(">=", 1)


async def measure(quick: bool, say: Callable[[str], None]) -> list[Row]:
    """All rows."""
    return await asyncio.to_thread(_measure, quick, say)


def _measure(quick: bool, say: Callable[[str], None]) -> list[Row]:
    trainers = QUICK_TRAINERS if quick else TRAINERS
    minutes = QUICK_MINUTES if quick else MINUTES

    def run(nodes: int, training: int) -> Traffic:
        traffic = measure_traffic(nodes, training, minutes, SEED)
        for line in traffic_lines(traffic):
            say(line)
        return traffic

    small, large = (run(nodes, trainers) for nodes in ((QUICK_SMALL, QUICK_LARGE) if quick else (SMALL, LARGE)))
    few, many = (run(nodes, nodes) for nodes in (ALL_TRAIN * trainers, 2 * ALL_TRAIN * trainers))
    return [*_grown(small, large), *_all_train(few, many)]


def _grown(small: Traffic, large: Traffic) -> list[Row]:
    """A larger swarm of which as many train."""
    who = f"{large.nodes} nodes over {small.nodes}, {large.trainers} train"
    per_record = f"{who}: per record, without pings and exchanges"
    return [
        row(f"{who}: control bytes", large.control_bytes / small.control_bytes, "x", FLAT, note=_of(large)),
        row(f"{who}: control messages", large.control_messages / small.control_messages, "x", FLAT),
        row(f"{per_record}, bytes", large.gossip_bytes / small.gossip_bytes, "x", FLAT),
        row(f"{per_record}, messages", large.gossip_messages / small.gossip_messages, "x", FLAT),
        row(f"{large.nodes} nodes: copies of a record that a node gets", large.copies, ""),
        row(f"{large.nodes} nodes: a record is everywhere, p50", large.p50_s, "s"),
        row(f"{large.nodes} nodes: a record is everywhere, p99", large.p99_s, "s", note="virtual seconds"),
        row(f"{large.nodes} nodes: records that did not reach all", large.lost, "", NONE),
        row(f"{large.nodes} nodes: rounds final on all that train", large.finals, "", SOME),
    ]


def _of(traffic: Traffic) -> str:
    return f"{traffic.control_bytes:,.0f} B, {traffic.control_messages:,.0f} messages per node and round"


def _all_train(few: Traffic, many: Traffic) -> list[Row]:
    """A larger swarm of which all train: each node reads more records."""
    who = f"all train, {many.nodes} over {few.nodes}"
    return [
        row(f"{who}: records of a round", many.records / few.records, "x"),
        row(f"{who}: gossip bytes per node and round", many.round_gossip_bytes / few.round_gossip_bytes, "x"),
        row(f"{who}: gossip bytes per node, round and record", many.gossip_bytes / few.gossip_bytes, "x", FLAT),
    ]
