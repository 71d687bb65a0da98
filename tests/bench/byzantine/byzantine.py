"""`atoll bench byzantine`: loss of runs with liars under each rule, and a rule's cost (docs/bench-byzantine.md).

Every arm is a run in one process: the same Θ₀, text and order for all arms of a seed. Each rule's outer rate is
chosen without liars, and stays. The figures are losses over that of the plain mean without liars: so a rule also
pays for members that it does not have, because they lie.
"""

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.compress.folding import OuterStep
from atoll.node.learning.compress.measuring import Judge
from atoll.node.learning.outer.aggregation import Aggregation
from atoll.node.learning.outer.judging import RULES
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import CHUNK
from atoll_bench.byzantine import trial
from atoll_bench.byzantine.adaptive import NAMES
from atoll_bench.byzantine.audit_trial import ROUNDS as AUDITED_ROUNDS
from atoll_bench.byzantine.audits import audited_rows
from atoll_bench.byzantine.trial import MEMBERS, Case
from atoll_bench.child import Child, enter_all, started
from atoll_bench.report import Bar, Row, paired_ratio, row

SHARES = {10: Bar("<=", 1.03), 20: Bar("<=", 1.03), 30: Bar("<=", 1.10), 40: None}
"""Percent of liars, and the loss that the worst attack may leave, over that of the mean without liars. Four of ten
are more than any rule promises to bear: shown, and not judged."""
COST, FOLD = Bar("<=", 1.01), Bar("<=", 2.0)
RATES_256 = (256, 384, 512, 768)
SHIPPED = "nnm"
"""The rule whose figures are judged."""
AUDITS = "audits"
"""In the place of a rule: the runs with audits."""
SEEDS = 3
ARM = "atoll_bench.byzantine.byzantine_arm"
TRIAL_S = 900.0


async def measure(
    quick: bool,
    say: Callable[[str], None],
    rules: str = f"mean,{SHIPPED},{AUDITS}",
    seeds: int = SEEDS,
    *,
    attacks: str = "",
    shares: str = "",
    dirichlet: float | None = None,
) -> list[Row]:
    """All rows: each rule without liars, each attack at each share, the worst, the cost of the fold; audits.

    `attacks`: only those whose names begin with one of these words, and no fold; `shares`: only these percents of
    liars; `dirichlet`: α of the mixtures.
    """
    names, drawn = [name for name in rules.split(",") if name != AUDITS], range(1, 2 if quick else seeds + 1)
    for rule in names:
        if rule != "mean" and rule != "clip" and rule not in RULES:
            raise ConfigError(f"no rule {rule!r}", hint=f"use some of mean, clip, {AUDITS}, {', '.join(RULES)}")
    chosen = chosen_attacks(attacks or "sign flip" if quick else attacks)
    judged = chosen_shares(shares or "20" if quick else shares)
    rounds = 2 if quick else trial.ROUNDS
    async with contextlib.AsyncExitStack() as stack:
        arms = await enter_all(stack, [started(ARM) for _ in range(os.cpu_count() or 1)])
        audited: list[Row] = []
        if AUDITS in rules.split(","):
            audited = await audited_rows(arms, drawn, 2 if quick else AUDITED_ROUNDS, say, dirichlet)
        if not names:
            return audited
        losses = Losses(arms, rounds, say)
        rates = await _rates(losses, names, dirichlet)
        say(", ".join(f"{rule}: rate {rate / 256:g}" for rule, rate in rates.items()))
        await losses.find(
            Case(rule, attack, MEMBERS * share // 100 if attack else 0, seed, rates[rule], dirichlet)
            for seed in drawn
            for rule in dict.fromkeys(("mean", *names))
            for attack, share in [(None, 0), *((attack, share) for share in judged for attack in chosen)]
            if rule in names or attack is None
        )
    found = (
        rows_of(rule, losses.found, rates, drawn, chosen, shares=judged, dirichlet=dirichlet) for rule in names
    )
    rows = [*audited, *(each for rows in found for each in rows)]
    sizes = () if attacks else (8,) if quick else (8, 16, 64)
    return rows + [
        fold_row(rule, members, 64 if quick else 2048, 2 if quick else 5)
        for rule in names
        if rule != "mean"
        for members in sizes
    ]


class Losses:
    """Losses of cases, by as many children as there are cores."""

    def __init__(self, arms: Sequence[Child], rounds: int, say: Callable[[str], None]) -> None:
        self._arms, self._rounds, self._say = arms, rounds, say
        self.found: dict[Case, float] = {}

    async def find(self, cases: Iterable[Case]) -> None:
        """Train those that are not known; each arm takes the next. Raises LocalFault."""
        waiting = iter([case for case in dict.fromkeys(cases) if case not in self.found])
        async with asyncio.TaskGroup() as group:
            for arm in self._arms:
                group.create_task(self._work(arm, waiting))

    async def _work(self, arm: Child, waiting: Iterator[Case]) -> None:
        for case in waiting:
            self.found[case] = await arm.ask("loss", TRIAL_S, case=case, rounds=self._rounds)
            words = f"{case.rule}, rate {case.alpha_256 / 256:g}, {case.attack or 'no attack'}"
            self._say(f"{words}, {case.liars} liars, seed {case.seed}: {self.found[case]:.4f}")


def chosen_attacks(words: str) -> tuple[str, ...]:
    """Attacks whose names begin with one of some words, commas between; all without words. Raises ConfigError."""
    for word in words.split(","):
        if not any(name.startswith(word) for name in NAMES):
            raise ConfigError(f"no attack {word!r}", hint=f"use some of {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name.startswith(tuple(words.split(","))))


def chosen_shares(words: str) -> Mapping[int, Bar | None]:
    """Named percents of liars, commas between, with their bars; all without words. Raises ConfigError."""
    legal = {str(share): share for share in SHARES}
    for word in filter(None, words.split(",")):
        if word not in legal:
            raise ConfigError(f"no share of {word!r} %", hint=f"use some of {', '.join(legal)}")
    return {share: bar for share, bar in SHARES.items() if not words or str(share) in words.split(",")}


async def _rates(losses: Losses, rules: Sequence[str], dirichlet: float | None) -> dict[str, int]:
    """The best outer rate of each rule without liars, on the first seed."""
    cases = {rule: [Case(rule, None, 0, 1, rate, dirichlet) for rate in RATES_256] for rule in ("mean", *rules)}
    await losses.find(case for each in cases.values() for case in each)
    return {rule: min(each, key=lambda case: losses.found[case]).alpha_256 for rule, each in cases.items()}


def rows_of(
    rule: str,
    losses: Mapping[Case, float],
    rates: Mapping[str, int],
    seeds: Iterable[int],
    attacks: Sequence[str],
    *,
    shares: Mapping[int, Bar | None] = SHARES,
    dirichlet: float | None = None,
) -> list[Row]:
    """A rule's rows: without liars, each attack, and the worst of each share."""

    def over(attack: str | None, liars: int) -> list[float]:
        return [
            losses[Case(rule, attack, liars, seed, rates[rule], dirichlet)]
            / losses[Case("mean", None, 0, seed, rates["mean"], dirichlet)]
            for seed in seeds
        ]

    judged = rule == SHIPPED
    name = rule if dirichlet is None else f"{rule}, Dirichlet {dirichlet:g}"
    rows = [_row(f"{name}: no attack", over(None, 0), COST if judged else None, f"rate {rates[rule] / 256:g}; ")]
    for share, bar in shares.items():
        found = {attack: over(attack, MEMBERS * share // 100) for attack in attacks}
        rows += [_row(f"{name}: {attack}, {share} %", each, None) for attack, each in found.items()]
        worst = max(found, key=lambda attack: statistics.mean(found[attack]))
        rows.append(_row(f"{name}: worst at {share} %", found[worst], bar if judged else None, f"{worst}; "))
    return rows


def _row(metric: str, ratios: Sequence[float], bar: Bar | None, note: str = "") -> Row:
    seeds = "seeds " + ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return row(metric, statistics.mean(ratios), "x", bar, note=note + seeds)


def fold_row(rule: str, members: int, chunks: int, turns: int) -> Row:
    """Time of a fold with the rule over one without, in turns, one thread."""
    torch.set_num_threads(1)
    codec, step = codec_of("sparse2", 64), OuterStep(256, 64)
    theta = torch.zeros((chunks, CHUNK), dtype=torch.int32)
    noise, nothing = torch.Generator().manual_seed(1), torch.zeros((chunks, CHUNK))
    common = torch.randn((chunks, CHUNK), generator=noise) * 1e-3
    payloads = [
        codec.encode(common + torch.randn((chunks, CHUNK), generator=noise) * 1e-3, nothing, nothing, 1.0)
        for _ in range(members)
    ]
    weigh = None if rule == "clip" else RULES[rule]
    atom_C = (np.arange(chunks) // 16).astype(np.int32)
    seconds: dict[str, list[float]] = {rule: [], "mean": []}

    def take(name: str, judge: Judge | None) -> None:
        began = time.perf_counter()
        codec.apply_update(theta, [64] * members, payloads, step, judge=judge)
        seconds[name].append(time.perf_counter() - began)

    for _ in range(turns + 1):
        take("mean", None)
        take(rule, Aggregation(weigh, 64, atom_C, [1 << 100] * (chunks // 16 + 1), 5))
    ratio = paired_ratio(seconds[rule][1:], seconds["mean"][1:])
    mean_ms = 1e3 * statistics.median(seconds["mean"][1:])
    note = f"mean {mean_ms:.0f} ms, {chunks * CHUNK >> 20} Mi parameters, one thread"
    return row(f"{rule}: fold of {members} / mean", ratio, "x", FOLD if rule == SHIPPED else None, note=note)
