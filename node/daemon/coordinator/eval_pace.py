"""How often a node validates its view: every few rounds, or as often as it costs little. Pure."""

from dataclasses import dataclass, field

from atoll.node.ipc.time_budget import TimeBudget

SHARE = 0.01
"""Of the time, at most, goes into validation where the user names no number of rounds."""


@dataclass(slots=True)
class EvalPace:
    """`every`: rounds from one validation to the next; 0: as SHARE allows. The last round is always validated."""

    every: int
    rounds: int
    allowance: TimeBudget = field(default_factory=lambda: TimeBudget(SHARE))

    def is_due(self, number: int, now: float) -> bool:
        """Whether round `number`, which has closed, is to be validated at `now` (monotonic seconds)."""
        if number == self.rounds - 1:
            return True
        return number % self.every == 0 if self.every else self.allowance.is_due(now)
