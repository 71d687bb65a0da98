"""Sparse upcycling: makes a dense checkpoint a mixture whose experts are copies of its feed-forward.

The method is that of Komatsuzaki et al., arXiv 2212.05055. With `normalise` and exact copies the mixture computes
what the dense model does; noise lets the experts diverge sooner. All is integer arithmetic from the run's seed, so
every machine gets the same bits.
"""

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.protocols.errors import ConfigError
from atoll.protocols.ids import digest
from atoll.protocols.run.model_spec import ExpertsSpec, ModelSpec, atoms, expert_of

ROUTER_SPREAD = 1 << 16
"""Router values are uniform within ± this, in units of 2⁻²⁴: ±0.004, so that routing starts near uniform."""
_MAX_SHIFT = 30


def upcycle(
    dense: ModelSpec, theta: dict[str, Tensor], experts: ExpertsSpec, seed: int, noise_shift: int | None = None
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The model and the int32 atoms of the mixture. Pure.

    With a `noise_shift`, each copied value v moves by a uniform draw within ± (|v| >> shift); None copies exactly.
    Raises ConfigError if the experts do not have the feed-forward's width.
    """
    model = upcycled(dense, experts)
    if noise_shift is not None and not 1 <= noise_shift <= _MAX_SHIFT:
        raise ConfigError(f"a noise shift of {noise_shift} is outside 1 … {_MAX_SHIFT}")
    found: dict[str, Tensor] = {}
    for atom in atoms(model):
        expert = expert_of(atom.name)
        if expert is not None:
            copy = theta[atom.name.replace(f".experts.{expert}.", ".")]
            found[atom.name] = copy.clone() if noise_shift is None else _noisy(copy, atom.name, seed, noise_shift)
        elif ".mlp.gate." in atom.name:
            found[atom.name] = _router(atom.name, atom.shape, seed)
        else:
            found[atom.name] = theta[atom.name].clone()
    return model, found


def upcycled(dense: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """The model of the mixture. Raises ConfigError if the experts do not have the feed-forward's width."""
    if dense.experts is not None or experts.ffn != dense.ffn:
        raise ConfigError(f"upcycling needs a dense model, and experts as wide as its feed-forward ({dense.ffn})")
    model = replace(dense, experts=experts, ffn=experts.per_token * experts.ffn)
    model.check()
    return model


def _router(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape, dtype=torch.int32)
    draw = _draws(name, int(np.prod(shape)), seed) % (2 * ROUTER_SPREAD + 1)
    return torch.from_numpy((draw - ROUTER_SPREAD).astype(np.int32)).reshape(shape)


def _noisy(copy: Tensor, name: str, seed: int, shift: int) -> Tensor:
    """A copy with noise: v plus a draw from −(|v| >> shift) … |v| >> shift, clipped to int32."""
    value = copy.reshape(-1).numpy().astype(np.int64)
    reach = np.abs(value) >> shift
    moved = value + _draws(name, len(value), seed) % (2 * reach + 1) - reach
    limits = np.iinfo(np.int32)
    return torch.from_numpy(moved.clip(limits.min, limits.max).astype(np.int32)).reshape(copy.shape)


def _draws(name: str, count: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """`count` uniform 62-bit integers from the atom's own stream (NumPy guarantees Philox's raw words)."""
    key = digest(b"atoll upcycle/1", seed.to_bytes(8, "little"), name.encode())[:16]
    raw = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(count)
    return (raw >> np.uint64(2)).astype(np.int64)
