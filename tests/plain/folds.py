"""The compiled fold and encoder, called with sets of (weight, payload) or (weight, payload, rows)."""

from concurrent.futures import ThreadPoolExecutor

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
    """Payload of β·e + (anchor − local); the residual becomes the rest. Threads fill it like a worker's."""
    layout = Layout(codec, len(residual), k)
    if threads == 1:
        return encoding.encode_residual(residual, anchor, local, beta, layout)
    payload, share = encoding.blank_payload(layout), -(-len(residual) // threads)

    def work(start):
        rows = slice(start, start + share)
        encoding.encode_rows(payload, layout, start, residual[rows], anchor[rows], local[rows], beta)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(0, len(residual), share)))
    return bytes(payload)
