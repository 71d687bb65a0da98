"""The table of k: numbers behind Θ in the state, chosen anew from the set of each N-th round.

It is part of the state digest, of saved states and of snapshots, so a late joiner has it, and it is computed again
with the round that it is made of. 0 is the k of the run. A payload says its own k, so the fold does not read it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.outer.fold import RoundSet
from atoll.node.worker.sizes.program import chosen, median_errors
from atoll.protocols.run.run_spec import RunSpec
from atoll.protocols.run.sized_payload import read_head, sized_layout, table_numbers


def k_in_state(spec: RunSpec, state_S4096: Tensor) -> tuple[int, ...]:
    """k of each tensor by the table behind Θ."""
    numbers = table_numbers(spec)
    rows = -(-numbers // state_S4096.shape[1])
    found = state_S4096[len(state_S4096) - rows :].reshape(-1)[:numbers].tolist()
    legal = spec.compress.sizes.ks if spec.compress.sizes else ()
    return tuple(k if k in legal else spec.compress.k for k in found)


def table_after(spec: RunSpec, number: int) -> Callable[[Tensor, RoundSet], None] | None:
    """What writes the table of a state `[S, 4096]` in place after round `number`; None where it stays."""
    sizes = spec.compress.sizes
    if not sizes or not sizes.is_measured(number):
        return None

    def write(state_S4096: Tensor, fresh: RoundSet) -> None:
        layout = sized_layout(spec, number)
        paths = [member.path for member in fresh.members if member.weight]
        if paths:
            heads = [read_head(map_payload(path), layout) for path in paths]
            k_T = chosen(median_errors([head.errors_TK for head in heads]), layout, sizes.goal)
            _write(state_S4096, k_T)

    return write


def _write(state_S4096: Tensor, k_T: Sequence[int]) -> None:
    rows = -(-len(k_T) // state_S4096.shape[1])
    state_S4096[len(state_S4096) - rows :].view(-1)[: len(k_T)] = torch.tensor(k_T, dtype=torch.int32)
