"""How many inner steps a member takes in a round, so that it is done when the others are.

Every member aims at the median of the times that the members need for the round's nominal steps. A slower member
takes fewer steps, a faster one more, within the bounds of the RunSpec; contributions are weighted by tokens, so
that fewer steps also count less. Pure: times are given.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor
from statistics import median

from atoll.protocols.ledger.registers import Lease
from atoll.protocols.run.run_spec import RunSpec

REMEMBERED = 5
"""Rounds whose median is a node's own speed: one disturbed round changes nothing."""
TOLERANCE = 0.1
"""Share of the nominal steps, or of those chosen last, within which another number is not worth a change."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """A node's own measured speed, and the number of steps that it chose last."""

    step_tokens: int
    """Tokens of one inner step."""
    least_256: int
    """Bounds of a choice, in 256ths of the nominal steps."""
    most_256: int
    step_s: tuple[float, ...] = ()
    """Own seconds per step of the newest rounds, oldest first."""
    chosen: int = 0
    """Steps of the newest choice; 0 before the first."""

    @property
    def tokens_per_s(self) -> float:
        """The node's own training speed; 0 before the first measured round."""
        return self.step_tokens / median(self.step_s) if self.step_s else 0.0


def measured(tempo: Tempo, train_s: float, steps: int) -> Tempo:
    """The tempo after a round whose `steps` steps took `train_s` seconds, without any waiting."""
    if train_s <= 0 or steps <= 0:
        return tempo
    return replace(tempo, step_s=(*tempo.step_s, train_s / steps)[-REMEMBERED:])


def choose(tempo: Tempo, nominal: int, speeds: Iterable[float]) -> Tempo:
    """The tempo with a choice for a round of `nominal` steps. `speeds`: the others' tokens/s; 0: unknown."""
    own = tempo.tokens_per_s
    others = [speed for speed in speeds if speed > 0]
    if not own or not others:
        return replace(tempo, chosen=nominal)
    # In the median time of all, this node included, so many steps fit. The median, because one very slow or very
    # fast member (or one that lies about its speed) must not set the pace of all.
    wish = nominal * own * median(1.0 / speed for speed in (own, *others))
    high = nominal * tempo.most_256 // 256
    return replace(
        tempo, chosen=max(_least(tempo, nominal), min(high, _steady(min(wish, high), nominal, tempo.chosen)))
    )


def shortened(tempo: Tempo, nominal: int, speeds: Iterable[float], late_s: float) -> int:
    """The steps that were chosen, without those of the first `late_s` seconds of a round that began without it."""
    # After a start its own speed is not known: it is taken for as fast as most.
    known = [tempo.tokens_per_s] if tempo.step_s else [speed for speed in speeds if speed > 0]
    if not late_s or not known:
        return tempo.chosen
    gone = min(tempo.chosen, late_s * median(known) / tempo.step_tokens)
    return max(_least(tempo, nominal), tempo.chosen - ceil(gone))


def _least(tempo: Tempo, nominal: int) -> int:
    """The fewest steps that a member may take in a round of `nominal` steps."""
    return -(-nominal * tempo.least_256 // 256)


def _steady(wish: float, nominal: int, before: int) -> int:
    """Whole steps for `wish`: the nominal number or that of the round before, where one of them is near."""
    # Wishes from n up to n + 1 are all rounded down to n, so nearness is measured from both ends of that range.
    near = (n for n in (nominal, before) if n and n - TOLERANCE * n <= wish <= (1 + TOLERANCE) * (n + 1))
    return next(near, floor(wish))


def round_seconds(spec: RunSpec, lease: Lease) -> float:
    """Seconds that the nominal steps of its round take a member, by its lease; 0 while it announces no speed."""
    tokens = spec.steps(lease.round) * spec.inner.batch * spec.model.context
    return tokens / lease.tokens_per_s if lease.tokens_per_s > 0 else 0.0
