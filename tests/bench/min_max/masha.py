"""MASHA1 and MASHA2: compressed extra-gradient, in both directions, for min-max problems.

    python -m atoll_bench.min_max.masha

Beznosikov et al., arXiv 2110.03313: extra-gradient with variance reduction around a point w, at which all members'
operators are known whole; between two such exchanges only compressed differences travel.

    z̄ = τz + (1 − τ)w        z½ = z̄ − γF(w)
    MASHA1, unbiased Q:       z ← z½ − γ·Q(mean_m Q(F_m(z½) − F_m(w)))
    MASHA2, contractive C:    g_m = C(e_m + γ(F_m(z½) − F_m(w))), e_m keeps the rest
                              z ← z½ − C(e + mean_m g_m), e keeps the rest
    with probability 1 − τ:   w ← z, and F(w) is exchanged whole

The formulas are from memory and the abstract; the paper's own listing could not be read when this was written. C
is this project's codec `sparse2`, whose encoder keeps the rest as error feedback. None of its codecs is unbiased:
Q sends k random values, scaled by size/k.

This is no fold of a run. A round of a run has one exchange, of what members moved by from the shared weights; here
a step needs operators at a second point that follows from an exchange, and now and then whole operators. And the
decoder's loss is a minimum, for which extra-gradient gains nothing.
"""

import argparse
import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from atoll.node.learning.compress.codecs import codec_of
from atoll.protocols.run.arena import CHUNK
from atoll_bench.min_max.problems import Bilinear, Problem, RobustRegression, Vector


class Settings(NamedTuple):
    """Step γ, the weight τ of the newest point, and values of each 4096 that a message has."""

    step: float
    newest: float
    k: int


class Rest:
    """A contractive compressor with its error feedback: what `sparse2` does not send is kept."""

    def __init__(self, size: int, k: int) -> None:
        # A smaller problem than a chunk has the same share of its values in a message.
        self._codec, self._size = codec_of("sparse2", max(1, min(size, CHUNK) * k // CHUNK)), size
        self._kept_C4096 = torch.zeros((-(-size // CHUNK), CHUNK))

    def __call__(self, values: Vector) -> Vector:
        """What arrives of these values and of what was kept before."""
        wanted_C4096 = torch.zeros_like(self._kept_C4096)
        wanted_C4096.view(-1)[: self._size] = torch.from_numpy(values).float()
        payload = self._codec.encode(self._kept_C4096, wanted_C4096, torch.zeros_like(wanted_C4096), 1.0)
        arrived_C4096 = torch.zeros_like(wanted_C4096)
        self._codec.give_back(arrived_C4096, payload)
        found: Vector = arrived_C4096.view(-1)[: self._size].double().numpy()
        return found


def random_values(values: Vector, k: int, rng: np.random.Generator) -> Vector:
    """k of 4096 values, drawn at random and scaled so that their expectation is the whole: unbiased."""
    count = max(1, len(values) * k // CHUNK)
    found = np.zeros_like(values)
    at = rng.choice(len(values), count, replace=False)
    found[at] = values[at] * (len(values) / count)
    return found


def masha1(problem: Problem, settings: Settings, steps: int, seed: int, seen: Callable[[Vector], None]) -> None:
    """MASHA1 from zero; `seen` is called with each point."""
    rng = np.random.default_rng(seed)

    def received(differences: list[Vector]) -> Vector:
        sent = [random_values(each, settings.k, rng) for each in differences]
        return settings.step * random_values(np.mean(sent, 0), settings.k, rng)

    _run(problem, settings, steps, rng, received, seen)


def masha2(problem: Problem, settings: Settings, steps: int, seed: int, seen: Callable[[Vector], None]) -> None:
    """MASHA2 from zero; `seen` is called with each point."""
    ups = [Rest(problem.size, settings.k) for _ in range(problem.members)]
    down = Rest(problem.size, settings.k)

    def received(differences: list[Vector]) -> Vector:
        return down(np.mean([up(settings.step * each) for up, each in zip(ups, differences, strict=True)], 0))

    _run(problem, settings, steps, np.random.default_rng(seed), received, seen)


def _run(
    problem: Problem,
    settings: Settings,
    steps: int,
    rng: np.random.Generator,
    received: Callable[[list[Vector]], Vector],
    seen: Callable[[Vector], None],
) -> None:
    members = range(problem.members)
    point = kept = np.zeros(problem.size)
    known = [problem.operator(member, kept) for member in members]
    for _ in range(steps):
        between = settings.newest * point + (1 - settings.newest) * kept
        half = between - settings.step * np.mean(known, 0)
        point = half - received([problem.operator(member, half) - known[member] for member in members])
        if rng.random() > settings.newest:
            kept, known = point, [problem.operator(member, point) for member in members]
        seen(point)


def descent_ascent(problem: Problem, settings: Settings, steps: int, seen: Callable[[Vector], None]) -> None:
    """Gradient descent-ascent with the same codec and its error feedback, for comparison."""
    ups, point = [Rest(problem.size, settings.k) for _ in range(problem.members)], np.zeros(problem.size)
    for _ in range(steps):
        moved = [up(settings.step * problem.operator(member, point)) for member, up in enumerate(ups)]
        point = point - np.mean(moved, 0)
        seen(point)


def distances(run: Callable[[Callable[[Vector], None]], None], solution: Vector, every: int) -> list[float]:
    """Distance to the solution over that of zero, at first and after every so many steps."""
    points: list[float] = [1.0]
    count = 0

    def seen(point: Vector) -> None:
        nonlocal count
        count += 1
        if count % every == 0:
            points.append(float(np.linalg.norm(point - solution) / np.linalg.norm(solution)))

    run(seen)
    return points


def main() -> None:
    """Print the distance of each method from the solution, on both problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bilinear = Bilinear(4, CHUNK // 2, 0.03, 1)
    robust = RobustRegression(4, CHUNK // 16, 512, 1)
    for name, problem, solution in (
        ("bilinear", bilinear, bilinear.solution()),
        ("robust regression", robust, solved(robust)),
    ):
        for method, run in methods(problem, args.steps).items():
            found = distances(run, solution, max(1, args.steps // 8))
            print(json.dumps({"problem": name, "method": method, "distance": [float(f"{d:.2e}") for d in found]}))


def methods(problem: Problem, steps: int) -> dict[str, Callable[[Callable[[Vector], None]], None]]:
    """The methods, with an eighth of the values and steps that were found by trying a few."""
    random, largest = Settings(0.05, 0.9, CHUNK // 8), Settings(0.15, 0.9, CHUNK // 8)
    return {
        "masha1": lambda seen: masha1(problem, random, steps, 1, seen),
        "masha2": lambda seen: masha2(problem, largest, steps, 1, seen),
        "descent-ascent": lambda seen: descent_ascent(problem, largest, steps, seen),
    }


def solved(problem: Problem, steps: int = 4000) -> Vector:
    """The solution by extra-gradient without compression."""
    point = np.zeros(problem.size)
    for _ in range(steps):
        point = point - 0.1 * _mean(problem, point - 0.1 * _mean(problem, point))
    return point


def _mean(problem: Problem, point: Vector) -> Vector:
    found: Vector = np.mean([problem.operator(member, point) for member in range(problem.members)], 0)
    return found


if __name__ == "__main__":
    main()
