"""Compiles everything that the codecs need, once: `python -m atoll.node.compress.warm`.

A worker compiles what it lacks at its first round; after this it only loads.
"""

import sys
import time

import torch

from atoll.node.compress.encoding import encode_residual
from atoll.node.compress.folding import Step, update_of
from atoll.protocols.arena import CHUNK


def warm() -> None:
    """One chunk through every codec."""
    base = torch.zeros((1, CHUNK), dtype=torch.int32)
    residual, local = torch.zeros((1, CHUNK)), torch.ones((1, CHUNK))
    update_of([(1, encode_residual(residual, base, local, 1.0, 64))], 1, 64, Step(256, 256))


def main() -> None:
    """Warm, and say how long it took."""
    began = time.monotonic()
    warm()
    sys.stdout.write(f"codecs compiled in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
