"""Whether given weights and a tokenizer belong together: their loss on a little of the text, before a run begins.

A tokenizer of another model with as many tokens is legal in every other way, and the weights would be trained on
what is noise to them. The bound is what a count of the tokens knows. Guessing evenly is none: tokenizers of one
kind share their first tokens, and with a foreign one a model may still do better than that (docs/log).
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.learning.data import corpus
from atoll.node.learning.data.cache import default_cache
from atoll.node.learning.data.given import open_tokenizer
from atoll.node.learning.data.tokens import Tokens, tokenizer_for
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model import bridge
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.model.named import named_atoms
from atoll.node.learning.outer.fixed import state_digest, to_float
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec

WINDOWS, MAX_CONTEXT = 8, 128
"""About a thousand tokens: the mean of their bits is known to some tenths."""
TEXT_BYTES = 1 << 18
_SLAB = 1 << 12


class Fit(NamedTuple):
    """Bits per token on the same windows of the validation text."""

    bits: float
    """Of the weights."""
    counted: float
    """Of how often each token is in the training text."""

    def judged(self, without_fit: bool) -> str:
        """What the user should know; or nothing. Raises ConfigError for a misfit, unless it is wanted."""
        if self.bits <= self.counted:  # false for NaN too
            return ""
        line = (
            f"weights and tokenizer do not fit: on the run's text they need {self.bits:.2f} bits a token, "
            f"a mere count of its tokens {self.counted:.2f}"
        )
        if without_fit:
            return line
        hint = "take the tokenizer.json published with the weights and a text that they may know, or --without-fit"
        raise ConfigError(line, hint=hint)


def fit_of(spec: RunSpec, weights: Path, tokenizer: bytes | None, path: str) -> Fit:
    """How the snapshot file `weights` does on the run's text; `path` is that of a `file:` source, `tokenizer` the
    file's bytes, None where it is one of ours. Raises ConfigError, CorruptFault, DiskFault, Unreachable.
    """
    text = corpus.load(spec.data.source, path, default_cache())
    tokens: Tokens = (
        tokenizer_for(spec.data.tokenizer, text.train)
        if tokenizer is None
        else open_tokenizer(tokenizer, spec.model.vocab)
    )
    windows_WT1 = _windows(tokens.encode(text.val[:TEXT_BYTES]), spec.model.context)
    nats = evaluate(_model(spec.model, weights), loss_of, windows_WT1, 1).val_loss
    counted = _counted(tokens.encode(text.train[:TEXT_BYTES]), windows_WT1[:, 1:], spec.model.vocab)
    return Fit(nats / math.log(2), counted)


def _windows(tokens_N: NDArray[np.int32], context: int) -> NDArray[np.int64]:
    """At most WINDOWS windows `[W, T + 1]`, evenly spread."""
    length = min(context, MAX_CONTEXT, len(tokens_N) - 1)
    if length < 1:
        raise ConfigError("the run's text is too short: it has less than two tokens to validate with")
    at_W = np.linspace(0, len(tokens_N) - length - 1, WINDOWS).astype(np.int64)
    found: NDArray[np.int64] = tokens_N[np.unique(at_W)[:, None] + np.arange(length + 1)].astype(np.int64)
    return found


def _counted(train_N: NDArray[np.int32], wanted: NDArray[np.int64], vocab: int) -> float:
    """Bits per token of the counts, each one higher than it is (Laplace)."""
    count_V = np.bincount(train_N, minlength=vocab) + 1
    return float(np.log2(count_V.sum() / count_V[wanted]).mean())


def _model(model: ModelSpec, weights: Path) -> Decoder:
    """The decoder with the weights of a snapshot file; by slabs, so that they are in memory twice at most."""
    arena = arena_of(model)
    theta_C4096 = read_own_snapshot(weights, arena, state_digest).theta_C4096
    decoder = Decoder(model)
    named = named_atoms(decoder)
    for start in range(0, arena.chunks, _SLAB):
        bridge.write_rows(named, arena, start, to_float(theta_C4096[start : start + _SLAB]))
    return decoder
