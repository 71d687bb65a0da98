"""Compiled: the outer step of one tensor of which members sent another k, from their decoded values.

The definition is `outer.mean.outer_update`; a test compares the bits. Only places that were sent are visited, so
a member that names another k than the others costs them little.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from atoll.node.learning.kernels.compiled import Ints, Ints32, compiled
from atoll.node.learning.outer.mean import Weighted
from atoll.protocols.errors import MODEL_LOST, Divergence
from atoll.protocols.run.arena import CHUNK


def fold_mixed(out_N4096: Tensor, members: Sequence[Weighted], alpha_256: int, floor_256: int) -> None:
    """Add U to θ, int32, in place. Raises Divergence where a weight leaves ±128; rows are then undefined."""
    index = torch.cat([places for _, places, _ in members], 1).numpy()
    moved = torch.cat([q * weight for weight, _, q in members], 1).numpy()
    weight = np.repeat(*np.array([(weight, q.shape[1]) for weight, _, q in members], np.int64).T)
    # Of the whole set: the floor is a share of all weight, wherever it was sent.
    least = max(1, -(-floor_256 * sum(each for each, _, _ in members) // 256))
    sums = np.zeros((2, CHUNK), np.int64)
    if not _add_means(out_N4096.numpy(), index, moved, weight, (alpha_256, least), sums):
        raise Divergence("a weight left its range of -128 … 128", hint=MODEL_LOST)


@compiled
def _add_means(out: Ints32, index: Ints, moved: Ints, weight: Ints, rule: tuple[int, int], sums: Ints) -> bool:
    """θ + U of all chunks; False where a sum does not fit. Sums are of one chunk, and 0 between two."""
    alpha, least = rule
    for c in range(len(out)):
        for i in range(index.shape[1]):
            place = index[c, i]
            # A value of 0 adds no weight to the divisor: nothing was sent.
            if moved[c, i] != 0:
                sums[0, place] += moved[c, i]
                sums[1, place] += weight[i]
        for i in range(index.shape[1]):
            place = index[c, i]
            if sums[1, place] == 0:
                continue
            total, under = sums[0, place] * alpha, max(sums[1, place], least) * 1024
            # Halves away from zero, as the definition.
            size = (2 * abs(total) + under) // (2 * under)
            ended = np.int64(out[c, place]) - (size if total > 0 else -size)
            sums[0, place], sums[1, place] = 0, 0
            if ended != np.int64(np.int32(ended)):
                return False
            out[c, place] = np.int32(ended)
    return True
