"""An audit: whether a contribution is work on the windows that its author was to train on (docs/audits.md).

Whoever trained on a window knows it better than a random one. What the others of the round improve as well is
taken away first, because windows differ in it much more. Nothing but forward passes is needed.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
import torch
from msgspec.structs import replace
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from atoll.node.checkpoint.disk import map_payload
from atoll.node.learning.compress.codecs import codec_of
from atoll.node.learning.data.dataset import RunText
from atoll.node.learning.model import bridge
from atoll.node.learning.outer.fixed import FRACTION_BITS, SLAB_CHUNKS
from atoll.node.worker.audits.replays import SentPayloads
from atoll.node.worker.round_trainer import WEIGHT_UNIT
from atoll.protocols.data.shard_order import Turn
from atoll.protocols.ids import PeerId
from atoll.protocols.ledger.records import MAX_EXCESS
from atoll.protocols.local.worker_messages import AuditReply, AuditRequest, Member
from atoll.protocols.run.arena import CHUNK, Arena, Placement, arena_of
from atoll.protocols.run.run_spec import RunSpec

WindowLosses = Callable[[Tensor, NDArray[np.int64]], list[float]]
"""Loss of an int32 state on each of these windows `[W, T + 1]`."""
UNIT = 16
"""Units of a verdict in a standard deviation."""
OTHERS = 8
"""Most other contributions of the round whose mean an audit leaves out."""
_LOW, _HIGH = -(2**31), 2**31 - 1
_FLOOR = 1 / 16
"""Least size of a value's gradients, as a share of their mean in its matrix: what hardly moved tells nothing."""


def audit(
    ask: AuditRequest,
    spec: RunSpec,
    data: RunText,
    losses_of: WindowLosses,
    theta_C4096: Tensor,
    rng: Generator,
    squares: Mapping[str, Tensor],
    sent: SentPayloads,
) -> AuditReply:
    """Audit a contribution at an int32 state, on windows that `rng` draws. Raises DecodeError, CorruptFault.

    `squares`: mean squared gradients of this member, by atom, as Adam has them; of matrices that Muon moves there
    are none. `sent`: the payloads that this member saw.
    """
    began = time.monotonic()
    assert spec.audit
    sent.add(ask.round, *ask.sent)
    if sent.holds_like(ask.audited, ask.before):
        return AuditReply(-MAX_EXCESS, time.monotonic() - began, was_sent_before=True)
    if not ask.measures:
        return AuditReply(0, time.monotonic() - began)
    own_W = drawn(spec, data, ask, rng)
    other_W = compared(spec, data, ask, rng, own_W, sent)
    ask = replace(ask, others=originals(ask, sent))
    step_C4096 = whitened(difference(spec, ask), arena_of(spec.model), squares)
    windows_WT1 = data.batch(np.concatenate([own_W, other_W]))
    found = [np.array(losses_of(moved(theta_C4096, step_C4096, sign), windows_WT1)) for sign in (1, -1)]
    # The contribution is subtracted from the weights: what it improves is worse with the plus.
    gain_W = found[0] - found[1]
    return AuditReply(excess(gain_W[: len(own_W)], gain_W[len(own_W) :]), time.monotonic() - began)


def drawn(spec: RunSpec, data: RunText, ask: AuditRequest, rng: Generator) -> NDArray[np.int64]:
    """Some of the windows that the author was to train on, of as many as it says that it took."""
    assert spec.audit
    said = claimed_windows(spec, ask)
    at_W = rng.choice(said, min(spec.audit.windows, said), replace=False)
    return data.windows_of(spec, Turn(ask.round, ask.audited.author), at_W)


def compared(
    spec: RunSpec, data: RunText, ask: AuditRequest, rng: Generator, own_W: NDArray[np.int64], sent: SentPayloads
) -> NDArray[np.int64]:
    """The windows that the assigned ones are compared with; of those that the round lacks more of these are drawn.

    Where two contributions of the round are alike, these are the other author's: the copy improves them more, and
    the original less. So order in time, which others can twist, says nothing of who copied.
    """
    assert spec.audit
    count = 2 * spec.audit.windows - len(own_W)
    # Shards of a packed text are fetched for the audited author alone.
    twin = sent.twin(ask.audited, ask.sent) if spec.data.index is None else None
    if twin is None:
        # From the same parts of the text: what is improved everywhere there is no sign of work on these windows.
        return data.windows_beside(own_W, rng, count)
    most = spec.steps(ask.round) * spec.inner.batch
    return data.windows_of(spec, Turn(ask.round, PeerId(twin.author)), rng.permutation(most)[:count])


def claimed_windows(spec: RunSpec, ask: AuditRequest) -> int:
    """Windows that the author claims to have trained on: by its tokens, and no fewer than its weight stands for.

    Whoever wants the weight of a whole round for a few windows is audited on those that it left out.
    """
    nominal = spec.steps(ask.round) * spec.inner.batch
    # The least that is rounded to this weight (`weight_of`).
    weighed = -(-(2 * ask.audited.weight - 1) * nominal // (2 * WEIGHT_UNIT))
    most = nominal * spec.pace.most_256 // 256
    # A weight beyond what the run allows is not cut: it stands for windows that nobody trained on.
    return max(1, weighed, min(most, ask.tokens // spec.model.context))


def originals(ask: AuditRequest, sent: SentPayloads) -> tuple[Member, ...]:
    """Up to eight others that are no copies of the audited contribution: less copies, nothing of it is left."""
    return tuple(islice((each for each in ask.others if not sent.is_copy(each, ask.audited)), OTHERS))


def difference(spec: RunSpec, ask: AuditRequest) -> Tensor:
    """The audited contribution less the others' mean by weight, in the layers' matrices; float32 `[C, 4096]`.

    Embeddings and vectors are left out: they hold what words are frequent, which hides what was trained on. Others
    are at most as long as the audited one in each matrix: a long copy would turn it around, noise would hide it.
    """
    arena, codec = arena_of(spec.model), codec_of(spec.compress.codec, spec.compress.k)
    step_C4096, sent_C4096 = (torch.zeros((arena.chunks, CHUNK)) for _ in range(2))
    codec.give_back(sent_C4096, map_payload(ask.audited.path))
    most = [(rows, float(sent_C4096[rows].norm())) for _, rows in _matrices(arena)]
    for rows, _ in most:
        step_C4096[rows] = sent_C4096[rows]
    total = sum(other.weight for other in ask.others)
    for other in ask.others:
        codec.give_back(sent_C4096.zero_(), map_payload(other.path))
        for rows, longest in most:
            share = min(1.0, longest / (float(sent_C4096[rows].norm()) or 1.0))
            step_C4096[rows].sub_(sent_C4096[rows], alpha=share * other.weight / total)
    return step_C4096


def whitened(step_C4096: Tensor, arena: Arena, squares: Mapping[str, Tensor]) -> Tensor:
    """The step with each value divided by the size of its gradients, in place; matrices without `squares` stay.

    Few values, whose gradients differ most from window to window, make most of a verdict's noise otherwise. The
    step as a whole stays as long as it was, measured in losses that it may change.
    """
    before = after = 0.0
    for place, rows in _matrices(arena):
        if place.name not in squares:  # Muon moves it, which has no second moments
            continue
        part_N4096 = step_C4096[rows]
        size_N4096 = torch.empty_like(part_N4096)
        bridge.read_rows({place.name: squares[place.name].to("cpu")}, arena, rows.start, size_N4096)
        size_N4096.sqrt_()
        floor = float(size_N4096.sum()) / math.prod(place.shape) * _FLOOR
        before += float((part_N4096 * size_N4096).norm()) ** 2
        part_N4096.div_(size_N4096 + floor if floor else math.inf)  # what never had a gradient tells nothing
        after += float((part_N4096 * size_N4096).norm()) ** 2
    return step_C4096.mul_(math.sqrt(before / after)) if after else step_C4096


def moved(theta_C4096: Tensor, step_C4096: Tensor, sign: int) -> Tensor:
    """The state ± the step, a new int32 array; saturated, because nothing is folded with it."""
    out = torch.empty_like(theta_C4096)
    for start in range(0, len(out), SLAB_CHUNKS):
        rows = slice(start, start + SLAB_CHUNKS)
        scaled = (step_C4096[rows].double() * 2.0**FRACTION_BITS).round_() * sign + theta_C4096[rows]
        out[rows] = scaled.clamp_(_LOW, _HIGH).to(torch.int32)
    return out


def excess(own_W: Sequence[float] | NDArray[np.float64], random_W: Sequence[float] | NDArray[np.float64]) -> int:
    """How far the first values lie above the others: the rank sum of Mann and Whitney, in 16ths of its deviation.

    Ranks, because single windows differ from the rest by any factor. 0 where all values are equal.
    """
    own, other = np.asarray(own_W), np.asarray(random_W)
    above = (own[:, None] > other).sum() + (own[:, None] == other).sum() / 2
    pairs = len(own) * len(other)
    deviation = np.sqrt(pairs * (len(own) + len(other) + 1) / 12)
    return int(np.clip(round(float((above - pairs / 2) / deviation * UNIT)), -MAX_EXCESS, MAX_EXCESS))


def _matrices(arena: Arena) -> Iterator[tuple[Placement, slice]]:
    """Each matrix of a layer with its chunks, rising."""
    for place in sorted(arena.placements, key=lambda place: place.first_chunk):
        if len(place.shape) == 2 and place.name.startswith("model.layers."):
            yield place, slice(place.first_chunk, place.first_chunk + place.blocks[0] * place.blocks[1])
