"""One virtual run from its setting to the oracle's verdict."""

import gc
import random
import time
from collections.abc import Sequence
from itertools import pairwise, takewhile
from statistics import median
from typing import NamedTuple

from atoll.node.daemon.consensus.proposer import patience_of
from atoll_bench.simulator.history import History
from atoll_bench.simulator.nemesis import Nemesis
from atoll_bench.simulator.oracle import Verdict, judge
from atoll_bench.simulator.world import Setting, World

QUIET_SHARE = 0.35
QUIET_LEAST_S = 420.0
"""A lease, the patience of an epoch and a few rounds, with time to spare."""

LIAR_PATIENCES = 2
"""What an owner of a ballot that lies costs the others at most (docs/finality.md)."""
LOOK_S = 10.0

PLOT_S = 1200.0
"""So much longer where liars answer in turn, and just a quorum is left in the end."""


class Result(NamedTuple):
    """How a virtual run went."""

    setting: Setting
    verdict: Verdict
    digest: str
    """Of the trace: equal for equal settings."""
    rounds: int
    """Rounds that were begun."""
    epochs: int
    """Epochs of the common chain, without the first."""
    faults: list[str]
    """What the nemesis did."""
    still_rounds: float
    """Longest time without a new final round after the last fault, at the median honest node, in round times."""
    cpu_s: float
    """CPU seconds that it took."""


def draw(seed: int, nodes: int, minutes: float, liars: int | None = None) -> Setting:
    """The setting of a seed; what the caller leaves open is drawn from it."""
    rng = random.Random(seed * 2 + 1)
    drawn = rng.choice((0, 0, 1, nodes // 10, nodes // 5))
    return Setting(
        seed=seed,
        nodes=nodes,
        minutes=minutes,
        liars=drawn if liars is None else liars,
        train_s=rng.choice((40.0, 60.0)),
        ahead=rng.choice((0.0, 0.25)),
    )


def play(setting: Setting) -> Result:
    """Run it, and judge it."""
    # All that a world makes dies with its last reference, but for the world itself (`forget`): looking for circles
    # meanwhile finds none, and takes a tenth of the time.
    gc.disable()
    try:
        return _play(setting)
    finally:
        gc.enable()


def _play(setting: Setting) -> Result:
    began = time.process_time()
    world = World(setting)
    end_s = 60.0 * setting.minutes
    quiet_s = min(max(QUIET_LEAST_S, QUIET_SHARE * end_s), end_s)
    nemesis = Nemesis(world, end_s - quiet_s)
    end_s += PLOT_S if setting.plan else 0.0
    world.begin(late=world.rng.randint(0, setting.nodes // 4))
    nemesis.begin()
    world.clock.run(end_s)
    verdict = judged_in_time(world)
    members = [member for member in world.members if member.is_up and not member.is_liar]
    chains = [len(member.finality.chain) for member in members]
    result = Result(
        setting=setting,
        verdict=verdict,
        digest=world.digest(),
        rounds=max(world.started, default=-1) + 1,
        epochs=max(chains, default=1) - 1,
        faults=nemesis.done,
        still_rounds=longest_still([m.history() for m in members], nemesis.last_s, world.clock.now)
        / setting.train_s,
        cpu_s=time.process_time() - began,
    )
    world.forget()
    return result


def longest_still(histories: Sequence[History], since: float, end: float) -> float:
    """The longest time from `since` on without a new final round, in seconds: at the median of these nodes."""
    # At the median: a few nodes in a chain of their own go on while others stand still, or the other way round.
    finals = [[row.at for row in one.rows if row.kind == "final" and row.at > since] for one in histories]
    found = [max(after - before for before, after in pairwise([since, *times, end])) for times in finals]
    return median(found) if found else end - since


def judged_in_time(world: World) -> Verdict:
    """What the oracle finds once liars that own the first ballots of the open round had all of their turns.

    Where no liar owns the first one it judges at once. Who is behind after that time stays so.
    """
    verdict = verdict_of(world)
    until = turns_end(world) if verdict.is_behind else 0.0
    while verdict.is_behind and world.clock.now < until:
        world.clock.run(world.clock.now + LOOK_S)
        verdict = verdict_of(world)
    return verdict


def turns_end(world: World) -> float:
    """When the open round is final at the latest, in virtual seconds; 0 if no liar has the first turn.

    It and the next one close, each of its first owners that lies has its turns, and the next one decides it.
    """
    front = max((m for m in world.members if m.is_up and not m.is_liar), key=lambda m: m.finality.last_final)
    liars = len([*takewhile(lambda peer: world.by_peer[peer].is_liar, front.finality.voters)])
    began = max((row.at for row in front.rows if row.kind == "final"), default=0.0)
    patience_s = patience_of(world.setting.train_s, world.setting.lease_s)
    grace = world.setting.round_config(front.peer).grace_256 / 256
    closes_s = 2 * (1 + grace) * world.setting.train_s
    return began + closes_s + (LIAR_PATIENCES * liars + 1) * patience_s if liars else 0.0


def verdict_of(world: World) -> Verdict:
    """What the oracle finds in all that the nodes of a world left behind until now."""
    histories = [member.history() for member in world.members if member.life]
    newest, setting = max(world.started, default=-1), world.setting
    goes_on = world.clock.now - world.started.get(newest, 0.0) < 4 * setting.train_s + setting.lease_s
    return judge(histories, newest, goes_on, world.started)
