"""The story of a simulated swarm, decided from a seed: which node is killed when, which one joins late. Pure."""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL node `node` once the swarm has reached `at_round`; start it again at `back_round`."""

    node: int
    at_round: int
    back_round: int
    delay_s: float
    """Wait after the round was seen, so that kills fall anywhere in a round."""


@dataclass(frozen=True, slots=True)
class Join:
    """Node `node` starts for the first time once the swarm has reached `at_round`."""

    node: int
    at_round: int


@dataclass(frozen=True, slots=True)
class Story:
    """The number of nodes at the start, and the kills and joins that follow."""

    founders: int
    kills: tuple[Kill, ...]
    joins: tuple[Join, ...]

    @property
    def nodes(self) -> int:
        """The number of nodes that ever run."""
        return self.founders + len(self.joins)


def plan(nodes: int, rounds: int, seed: int, *, kill: bool, late_join: bool) -> Story:
    """The story of one seed. Any founder may be the victim, the run's owner too."""
    rng = random.Random(seed)
    half = rounds // 2
    kills: tuple[Kill, ...] = ()
    if kill and nodes > 1:
        at = rng.randint(max(1, rounds // 5), max(1, half - 1))
        back = min(rounds - 2, at + rng.randint(2, 4))
        kills = (Kill(rng.randrange(nodes), at, max(at, back), rng.random() * 2.0),)
    joins = (Join(nodes, half),) if late_join else ()
    return Story(nodes, kills, joins)
