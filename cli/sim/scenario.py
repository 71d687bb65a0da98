"""The story of a simulated swarm, decided from a seed: which node is killed when, which one joins late. Pure.

What happens next depends on what the nodes were seen to do, never on time: a busy machine only makes it later.
"""

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL node `node` once the swarm has reached `at_round`; start it again when `away` rounds lack it."""

    node: int
    at_round: int
    away: int
    """Final rounds after the kill without the node's contribution."""
    delay_s: float
    """Wait after the round was seen, so that kills fall anywhere in a round."""


@dataclass(frozen=True, slots=True)
class Join:
    """Node `node` starts for the first time once the swarm has reached `at_round`."""

    node: int
    at_round: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What the nodes were seen to do so far."""

    reached: int = 0
    """The newest round that any node trains."""
    final: Mapping[int, Collection[int]] = field(default_factory=dict)
    """The nodes that contributed to each final round."""
    killed: Mapping[int, int] = field(default_factory=dict)
    """The newest round at the kill of each node that was killed."""
    started: Mapping[int, int] = field(default_factory=dict)
    """The newest round when each killed or late node was started."""


@dataclass(frozen=True, slots=True)
class Story:
    """The number of nodes at the start, and the kills and joins that follow."""

    founders: int
    kills: tuple[Kill, ...]
    joins: tuple[Join, ...]
    hold_at: int
    """From this round on the swarm waits for nodes that are on their way: the rounds after it are for them."""

    def to_kill(self, seen: Seen) -> list[Kill]:
        """The kills that are due."""
        return [kill for kill in self.kills if kill.node not in seen.killed and seen.reached >= kill.at_round]

    def to_start(self, seen: Seen) -> list[int]:
        """The killed and late nodes whose start is due: at the latest when the swarm may wait for them."""
        due = [join.node for join in self.joins if seen.reached >= join.at_round]
        for kill in self.kills:
            if kill.node in seen.killed:
                later = [nodes for number, nodes in seen.final.items() if number > seen.killed[kill.node]]
                lacking = sum(kill.node not in nodes for nodes in later)
                due += [kill.node] if lacking >= kill.away or seen.reached >= self.hold_at else []
        return [node for node in due if node not in seen.started]

    def is_over(self, seen: Seen) -> bool:
        """Whether all kills and starts have happened."""
        return len(seen.started) == len(self.kills) + len(self.joins)

    def must_hold(self, seen: Seen, loading: Collection[int]) -> bool:
        """Whether the others must wait for one of `loading`, nodes that run and do not train yet."""
        return seen.reached >= self.hold_at and any(node in loading for node in seen.started)


def plan(nodes: int, rounds: int, seed: int, *, kill: bool, late_join: bool) -> Story:
    """The story of one seed. Any founder may be the victim, the run's owner too."""
    rng = random.Random(seed)
    half = rounds // 2
    kills: tuple[Kill, ...] = ()
    if kill and nodes > 1:
        at = rng.randint(max(1, rounds // 5), max(1, half - 1))
        away = rng.randint(2, 4)
        kills = (Kill(rng.randrange(nodes), at, away, rng.random() * 2.0),)
    joins = (Join(nodes, half),) if late_join else ()
    return Story(nodes, kills, joins, rounds - max(4, rounds // 4))
