"""How many inner steps a member takes in a round, of how many sequences, so that it is done when the others are.

Every member aims at one time, which follows from those that the members need for the round's nominal steps (see
`arrival`). A slower member takes fewer steps, a faster one more, within the bounds of the RunSpec. One for which
the least number of steps is too much takes fewer sequences in each of them. Contributions are weighted by tokens,
so that less work also counts less. Pure: times are given.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, isfinite
from statistics import median, median_low
from typing import NamedTuple

from atoll.node.daemon.steps.arrival import WHOLE_256, group_s, median_s
from atoll.protocols.local.durations import pace_s
from atoll.protocols.run.run_spec import Arrival, RunSpec

REMEMBERED = 5
"""Rounds whose median is a node's own speed: one disturbed round changes nothing."""
PACE_S, PACE_LEAST, PACE_MOST = 600.0, 8, 64
"""The pace of a run is that of the rounds of so many seconds, and of at least and at most so many rounds."""
TOLERANCE = 0.1
"""Share of the nominal number, or of the one chosen last, within which another number is not worth a change."""
LEAST_SHARE = 128
"""A member trains on no less than one part of so many of the round's nominal tokens: a weight cannot say less."""
AIM = 0.75
"""Share of the others' time for the steps of who leaves out sequences: what such a slow machine does besides, from
the encoding to the disk, takes its time too."""
PROBE_ROUNDS = 12
"""After so many rounds with steps of one size, not whole ones, a round takes more sequences: whether they fit."""
PROBE_SHARE = 4
"""A probe takes one sequence more for each so many that there were, and at least one."""
GROWTH = 2
"""The most by which a step's sequences grow from one round to the next: small steps tell little of large ones."""
LIMIT_ROUNDS = 2.0
"""A round that takes a member so many times what the others need is cut short."""
LIMIT_LEAST_S = 5.0
"""By so much it is longer in any case: rounds of a second are disturbed by anything."""


class Work(NamedTuple):
    """What a member takes of a round."""

    steps: int
    sequences: int
    """Of each step."""


class Timed(NamedTuple):
    """How long the steps of a trained round took."""

    share: float
    """Sequences of a step, on average, over those of a whole one."""
    step_s: float
    """Seconds per step, on average, without any waiting."""
    is_even: bool
    """Whether all steps had as many sequences; a round that is cut short began with more."""


@dataclass(frozen=True, slots=True)
class Tempo:
    """A node's own measured speed, and what it chose last."""

    step_tokens: int
    """Tokens of one whole inner step."""
    least_256: int
    """Bounds of a choice, in 256ths of the nominal steps."""
    most_256: int
    rounds: tuple[Timed, ...] = ()
    """The newest rounds, oldest first."""
    chosen: int = 0
    """Steps of the newest choice; 0 before the first."""
    batch: int = 1
    """Sequences of a whole step, of which a choice may leave some out; 1: none may be left out."""
    sequences: int = 0
    """Sequences of each of these steps, of `batch`; 0 before the first choice."""
    fixed: float = 0.0
    """Share of a whole step's time that a step takes however few its sequences are, 0 … 1."""
    arrival: Arrival = "median"
    """When the members should be done, see `arrival.py`."""

    @property
    def tokens_per_s(self) -> float:
        """The node's own training speed in whole steps; 0 before the first measured round."""
        return self.step_tokens / self.step_s(self.batch) if self.rounds else 0.0

    def step_s(self, sequences: int) -> float:
        """Seconds that a step of so many sequences is expected to take; a round was measured."""
        whole_s = median(each.step_s / self._part(each.share) for each in self.rounds[-REMEMBERED:])
        return whole_s * self._part(sequences / self.batch)

    def fitting(self, step_s: float) -> int:
        """Most sequences of a step that takes no longer than this; may be 0, or more than `batch`."""
        most = step_s / self.step_s(self.batch)
        if self.fixed == 1:
            return self.batch if most >= 1 else 0
        return floor(self.batch * min(1.0, (most - self.fixed) / (1 - self.fixed)))

    @property
    def wants_probe(self) -> bool:
        """Whether nothing has been learnt for long of steps with more sequences than a step has now."""
        sizes = {each.share for each in self.rounds}
        return len(self.rounds) == PROBE_ROUNDS and len(sizes) == 1 and sizes.pop() < 1

    def done_s(self, nominal: int, speeds: Iterable[float]) -> float:
        """Seconds after which a round of `nominal` steps should be done. `speeds`: tokens/s, above 0, not none."""
        whole_s = [nominal * self.step_tokens / speed for speed in speeds]
        if self.arrival == "group":
            return group_s(whole_s, self.least_256, self.most_256)
        return median_s(whole_s)

    def _part(self, share: float) -> float:
        """Time of a step with this share of the sequences, over that of a whole one."""
        return self.fixed + (1 - self.fixed) * share


def tempo_of(spec: RunSpec, devices: int) -> Tempo:
    """The tempo of a node that has just started. `devices`: that share each of its steps."""
    inner, pace = spec.inner, spec.pace
    # Several devices share the sequences of whole steps; and where no step may be left out, no sequence may.
    batch = inner.batch if devices == 1 and pace.least_256 < WHOLE_256 else 1
    arrival = pace.arrival or "median"
    return Tempo(inner.batch * spec.model.context, pace.least_256, pace.most_256, batch=batch, arrival=arrival)


def measured(tempo: Tempo, train_s: float, steps: int, tokens: int) -> Tempo:
    """The tempo after a round: `steps` steps, of `tokens` tokens in all, took `train_s` s without any waiting."""
    if train_s <= 0 or tokens <= 0:
        return tempo
    share = tokens / (steps * tempo.step_tokens)
    is_even = tempo.sequences in (0, round(share * tempo.batch, 6))
    rounds = (*tempo.rounds, Timed(share, train_s / steps, is_even))[-PROBE_ROUNDS:]
    # Neighbours, because the machine is most likely as fast in both; and the lower one of two, because too few
    # sequences for a while cost less than rounds that are late.
    found = [
        _fixed(one, two) for one, two in pairwise(rounds) if one.is_even and two.is_even and one.share != two.share
    ]
    return replace(tempo, rounds=rounds, fixed=median_low(found) if found else tempo.fixed)


def _fixed(one: Timed, two: Timed) -> float:
    """Share of a whole step's time that does not depend on its sequences, by two rounds with other sizes."""
    per_share_s = (one.step_s - two.step_s) / (one.share - two.share)
    whole_s = one.step_s + per_share_s * (1 - one.share)
    return min(1.0, max(0.0, 1 - per_share_s / whole_s)) if whole_s > 0 else 1.0


def choose(tempo: Tempo, nominal: int, speeds: Iterable[float]) -> Tempo:
    """The tempo with a choice for a round of `nominal` steps. `speeds`: the others' tokens/s; 0: unknown."""
    own = tempo.tokens_per_s
    others = [speed for speed in speeds if speed > 0]
    if not own or not others:
        return replace(tempo, chosen=nominal, sequences=tempo.batch)
    # So many steps fit into the time of all, this node included.
    wish = tempo.done_s(nominal, (own, *others)) * own / tempo.step_tokens
    high, low = nominal * tempo.most_256 // WHOLE_256, least(tempo, nominal)
    steps = min(high, _steady(min(wish, high), nominal, tempo.chosen))
    growth = GROWTH * tempo.sequences or tempo.batch
    if steps >= low.steps and growth >= tempo.batch:
        return replace(tempo, chosen=steps, sequences=tempo.batch)
    # Few steps of many sequences are less noisy than many of few; further steps take what is left of the time.
    time_s = AIM * wish * tempo.step_s(tempo.batch)
    fitting = tempo.batch if steps >= low.steps else tempo.fitting(time_s / low.steps)
    sequences = max(low.sequences, min(tempo.batch, growth, fitting))
    if tempo.wants_probe and sequences == tempo.sequences:
        sequences = min(tempo.batch, sequences + max(1, sequences // PROBE_SHARE))
    steps = max(low.steps, floor(min(nominal, time_s / tempo.step_s(sequences))))
    return replace(tempo, chosen=steps, sequences=sequences)


def least(tempo: Tempo, nominal: int) -> Work:
    """The least that a member may take of a round of `nominal` steps."""
    steps = -(-nominal * tempo.least_256 // WHOLE_256)
    return Work(steps, min(tempo.batch, -(-nominal * tempo.batch // (LEAST_SHARE * steps))))


def limit_s(tempo: Tempo, nominal: int, speeds: Iterable[float]) -> float:
    """Seconds after which a round is cut short: the least is taken of what is left. 0: never.

    Nobody can foresee that a round takes too long after a start, or when something else begins to use the machine.
    """
    others = [speed for speed in speeds if speed > 0]
    if tempo.batch == 1 or not others:
        return 0.0
    # The time that the work is chosen by, with its own speed: of two members neither cuts the other alone.
    known = [tempo.tokens_per_s, *others] if tempo.rounds else others
    round_s = tempo.done_s(nominal, known)
    limit = max(LIMIT_ROUNDS * round_s, round_s + LIMIT_LEAST_S)
    return limit if isfinite(limit) else 0.0


def shortened(tempo: Tempo, nominal: int, speeds: Iterable[float], late_s: float) -> int:
    """The steps that were chosen, without those of the first `late_s` seconds of a round that began without it."""
    # After a start its own speed is not known: it is taken for as fast as most.
    known = [speed for speed in speeds if speed > 0]
    if not late_s or not (tempo.rounds or known):
        return tempo.chosen
    whole_s = tempo.step_tokens / median(known) if known else 0.0
    step_s = tempo.step_s(tempo.sequences) if tempo.rounds else whole_s * tempo.sequences / tempo.batch
    # Others may be said to be so fast that a step takes nothing.
    gone = min(tempo.chosen, late_s / step_s) if step_s else tempo.chosen
    return max(least(tempo, nominal).steps, tempo.chosen - ceil(gone))


def _steady(wish: float, nominal: int, before: int) -> int:
    """A whole number for `wish`: the nominal one or that of the round before, where one of them is near."""
    # Wishes from n up to n + 1 are all rounded down to n, so nearness is measured from both ends of that range.
    near = (n for n in (nominal, before) if n and n - TOLERANCE * n <= wish <= (1 + TOLERANCE) * (n + 1))
    return next(near, floor(wish))


class RoundStart(NamedTuple):
    """When this node began a round."""

    round: int
    at_s: float
    """Monotonic seconds."""
    steps: int
    """The nominal steps of the round."""


@dataclass(frozen=True, slots=True)
class RoundStarts:
    """When the newest rounds of this node began, from which follows how fast the run goes, waiting included."""

    began: tuple[RoundStart, ...] = ()
    """Oldest first."""

    def after(self, number: int, now: float, steps: int) -> "RoundStarts":
        """With a round of so many nominal steps that begins now. One that begins again starts the count anew."""
        start = RoundStart(number, now, steps)
        if self.began and self.began[-1].round >= number:
            return RoundStarts((start,))
        # Enough rounds that their unevenness evens out, and few enough that a run that changed is seen.
        recent = [each for each in self.began[-PACE_MOST:] if now - each.at_s <= PACE_S]
        return RoundStarts((*max(recent, self.began[-PACE_LEAST:], key=len), start))

    @property
    def round_s(self) -> float:
        """Seconds from round to round, see `pace_s`; 0 before two rounds have begun."""
        # Rounds that this node did not train lie between two starts: the time is divided among them.
        pairs = list(pairwise(self.began))
        took_s = [
            (to.at_s - start.at_s) / (to.round - start.round)
            for start, to in pairs
            if start.steps == pairs[-1][0].steps  # a stage of the run with other steps has another pace
        ]
        return pace_s(took_s) if took_s else 0.0

    @property
    def expected_s(self) -> float:
        """Seconds that the round at hand takes: `round_s`, or more where its stage has more steps."""
        more = self.began[-1].steps / self.began[-2].steps if len(self.began) > 1 else 1.0
        return self.round_s * max(1.0, more)
