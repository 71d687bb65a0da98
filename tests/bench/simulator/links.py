"""Which virtual nodes reach each other: partitions in both directions or one, bridges, loss and delay."""

import random

LEAST_S, MOST_S = 0.05, 0.6
"""Seconds that a pushed message takes between two nodes that are not slow."""


class Links:
    """Directed links between nodes by number. A node has a side; some ways between sides are blocked."""

    LOST_AFTER_S = 15.0
    """Seconds after which a node notices that a connection carries nothing any more."""

    def __init__(self, rng: random.Random, count: int) -> None:
        self._rng = rng
        self.loss = 0.0
        """Share of pushed messages that are lost. Exchanges are repeated until they succeed."""
        self.slowness = [1.0] * count
        """Factor of each node's delays and transfers."""
        self._side = [0] * count
        self._blocked: frozenset[tuple[int, int]] = frozenset()
        self.blocked_since = 0.0

    def block(self, sides: list[int], blocked: frozenset[tuple[int, int]], now: float) -> None:
        """Put every node on a side, and let nothing pass on these ways between sides."""
        self._side, self._blocked, self.blocked_since = sides, blocked, now

    def heal(self) -> None:
        """Let everything pass again."""
        self._blocked = frozenset()

    @property
    def are_whole(self) -> bool:
        """Whether everybody reaches everybody."""
        return not self._blocked

    def passes(self, sender: int, receiver: int) -> bool:
        """Whether a message reaches the receiver now."""
        return not self._blocked or (self._side[sender], self._side[receiver]) not in self._blocked

    def joins(self, one: int, other: int) -> bool:
        """Whether questions and answers pass between the two."""
        return not self._blocked or (self.passes(one, other) and self.passes(other, one))

    def is_lost(self) -> bool:
        """Whether this push gets lost."""
        return self.loss > 0.0 and self._rng.random() < self.loss

    def delay_s(self, sender: int, receiver: int) -> float:
        """Seconds until a pushed message is there."""
        slowness = self.slowness
        # As `uniform` reckons it, without its call: this is asked for each entry and receiver.
        factor, other = slowness[sender], slowness[receiver]
        return (LEAST_S + (MOST_S - LEAST_S) * self._rng.random()) * (other if other > factor else factor)
