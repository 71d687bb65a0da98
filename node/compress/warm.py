"""Compiles everything that the codecs need, once: `python -m atoll.node.compress.warm`.

A worker compiles what it lacks at its first round; after this it only loads.
"""

import sys
import time

import torch

from atoll.node.compress.codecs import codec_of
from atoll.node.compress.folding import Step
from atoll.protocols.arena import CHUNK
from atoll.protocols.payload import DENSE_BLOCK, NUMBERS


def warm() -> None:
    """One chunk through every codec."""
    for name in NUMBERS:
        codec = codec_of(name, CHUNK if name in DENSE_BLOCK else 64)
        anchor = torch.zeros((1, CHUNK))
        residual, local = torch.zeros((1, CHUNK)), torch.ones((1, CHUNK))
        payload = codec.encode(residual, anchor, local, 1.0)
        codec.update_of([(1, payload)], 1, Step(256, 256))
        codec.give_back(residual, payload)


def main() -> None:
    """Warm, and say how long it took."""
    began = time.monotonic()
    warm()
    sys.stdout.write(f"codecs compiled in {time.monotonic() - began:.0f} s\n")


if __name__ == "__main__":
    main()
