"""Generates Θ₀, the first values of every atom, with the same bits on every machine.

Normal generators of torch and NumPy use `log`, `sqrt` and vector units, whose last bits differ between
processors and versions. So the values come from integers only. NumPy guarantees Philox's raw 64-bit stream; the
sum of a word's four 16-bit fields (Irwin–Hall, n = 4: bell-shaped, cut at ±3.46 σ) is scaled by an integer. The
result is a multiple of 2⁻²⁴, the step of the shared weights, and below 1 it is exact in float32. Every atom has
its own key, so a node can generate only the atoms that it holds.
"""

import math

import numpy as np
from numpy.typing import NDArray

from atoll.protocols.ids import digest
from atoll.protocols.run.lora import FACTORS, is_adapter
from atoll.protocols.run.model_spec import BIAS, PROJECTION_BIAS, Atom, ModelSpec, atoms, is_experts
from atoll.protocols.run.sections.plugin import ONES, ZEROS

UNIT = 1 << 24
"""1.0 in units of 2⁻²⁴."""
_FIELD = (1 << 16) - 1
_BLOCK = 1 << 20
_SCALE_BITS = 32
_VARIANCE_OF_SUM = 4 * ((1 << 32) - 1) // 12
"""Variance of the sum of four uniform 16-bit integers."""
EMBED_VARIANCE_INVERSE = 2500
"""1/σ² of embeddings: σ = 0.02, as in GPT-2 and Llama."""


def variance_inverse(atom: Atom, model: ModelSpec) -> int:
    """1/σ² of a matrix: its fan-in, so that activations keep their size.

    Matrices that write into the residual stream are smaller by √(2·layers), or its variance would grow (GPT-2
    §2.3).
    """
    if atom.name in ("model.embed_tokens.weight", "lm_head.weight"):
        return EMBED_VARIANCE_INVERSE
    writes = atom.name.endswith(("o_proj.weight", "down_proj.weight"))
    # A slice adds to the same output as the others: its fan-in is that of the whole feed-forward.
    fan_in = model.ffn if model.ffn_slices and is_experts(atom.name) and writes else atom.shape[1]
    return fan_in * (2 * model.layers if writes else 1)


def bell(key: bytes, count: int, inverse: int) -> NDArray[np.int32]:
    """`count` bell-shaped int32 with mean 0 and σ = 2²⁴/√inverse, from a 16-byte key."""
    source = np.random.Philox(key=int.from_bytes(key, "little"))
    scale = math.isqrt(((1 << (2 * _SCALE_BITS)) * UNIT * UNIT) // (inverse * _VARIANCE_OF_SUM))
    out = np.empty(count, np.int32)
    for at in range(0, count, _BLOCK):
        raw = source.random_raw(min(_BLOCK, count - at))
        total = sum((raw >> np.uint64(shift) & np.uint64(_FIELD)).astype(np.int64) for shift in (0, 16, 32, 48))
        # |total − mean| < 2¹⁷ and scale < 2⁴⁰ for every inverse ≥ 1: the product is below 2⁵⁷.
        out[at : at + _BLOCK] = ((total - 2 * _FIELD) * scale + (1 << (_SCALE_BITS - 1))) >> _SCALE_BITS
    return out


def genesis_atom(atom: Atom, model: ModelSpec, seed: int) -> NDArray[np.int32]:
    """First values of one atom, int32 in units of 2⁻²⁴: norms 1, biases 0, matrices bell-shaped around 0; of a
    package's model as it says."""
    if model.plugin is not None:
        return _plugged(atom, next(one.start for one in model.plugin.tensors if one.name == atom.name), seed)
    if atom.name.endswith((BIAS, PROJECTION_BIAS)):
        return np.zeros(atom.shape, np.int32)
    if is_adapter(atom.name):
        return _adapter(atom, model, seed)
    if len(atom.shape) == 1:
        return np.full(atom.shape, UNIT, np.int32)
    return bell(_key(atom, seed), math.prod(atom.shape), variance_inverse(atom, model)).reshape(atom.shape)


def _key(atom: Atom, seed: int) -> bytes:
    return digest(b"atoll genesis/1", seed.to_bytes(8, "little"), atom.name.encode())[:16]


def _plugged(atom: Atom, start: int, seed: int) -> NDArray[np.int32]:
    if start in (ZEROS, ONES):
        return np.full(atom.shape, UNIT if start == ONES else 0, np.int32)
    return bell(_key(atom, seed), math.prod(atom.shape), start).reshape(atom.shape)


def _adapter(atom: Atom, model: ModelSpec, seed: int) -> NDArray[np.int32]:
    """B is zero, so that a run begins as its base; A has the variance that peft gives it, 1/(3·fan-in)."""
    (values,) = atom.shape
    if FACTORS[1] in atom.name:
        return np.zeros(values, np.int32)
    return bell(_key(atom, seed), values, 3 * (values // model.lora_rank))


def genesis(model: ModelSpec, seed: int) -> dict[str, NDArray[np.int32]]:
    """First values of all atoms, int32 in units of 2⁻²⁴, by name in the agreed order."""
    return {atom.name: genesis_atom(atom, model, seed) for atom in atoms(model)}
