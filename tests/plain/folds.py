"""The compiled fold and encoder, called with sets of (weight, payload) or (weight, payload, rows)."""

import torch

from atoll.node.learning.compress import encoding
from atoll.node.learning.compress.codecs import codec_of
from atoll.protocols.run.payload import Layout


def apply_update(codec, theta, members, step, *, threads=1):
    """θ + U of a set."""
    weights, payloads = [member[0] for member in members], [member[1] for member in members]
    rows = [member[2] if len(member) == 3 else None for member in members]
    return codec.apply_update(theta, weights, payloads, step, rows=rows, threads=threads)


def update_of(members, chunks, k, step, *, codec, threads=1):
    """U of a set, int32 `[chunks, 4096]`."""
    nothing = torch.zeros((chunks, 4096), dtype=torch.int32)
    return apply_update(codec_of(codec, k), nothing, members, step, threads=threads)


def encode_residual(residual, anchor, local, beta, k, *, codec, threads=1):
    """Payload of β·e + (anchor − local); the residual becomes the rest."""
    layout = Layout(codec, len(residual), k)
    return encoding.encode_residual(residual, anchor, local, beta, layout, threads=threads)
