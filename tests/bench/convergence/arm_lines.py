"""The command of a trial that is no part of `atoll bench convergence`: a JSON line for each arm and seed."""

import argparse
import json
import time
from collections.abc import Callable, Collection

import torch

Run = Callable[[str, int, int, str], dict[str, object]]
"""Trains an arm, by its name, seed, rounds and size of the model."""


def print_lines(run: Run, arms: Collection[str], about: str | None, steps: str) -> None:
    """Train the arms that the command line names. `about` is its help, `steps` those of a round."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=100, help=f"of {steps}")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--size", default="micro")
    parser.add_argument("--arms", nargs="+", default=list(arms), choices=arms)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.arms:
            began = time.process_time()
            found = run(name, seed, args.rounds, args.size)
            cpu_s = round(time.process_time() - began)
            line = {"arm": name, "seed": seed, "rounds": args.rounds, **found, "cpu_s": cpu_s}
            print(json.dumps(line), flush=True)
