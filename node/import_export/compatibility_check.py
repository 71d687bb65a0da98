"""Checks before a run begins that given weights and a tokenizer belong together, by their loss on a little text.

Another model's tokenizer with as many tokens passes every other check, and the run would train on noise. The bound
is the loss of token counts. A uniform guess is too weak a bound: tokenizers of one kind share their first tokens,
so a model does better than that even with a foreign one (docs/log).
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.node.checkpoint.snapshot import read_own_snapshot
from atoll.node.learning.data import corpus
from atoll.node.learning.data.given import open_tokenizer
from atoll.node.learning.data.shakespeare import default_cache
from atoll.node.learning.data.tokens import TextTokenizer, built_in_tokenizer
from atoll.node.learning.inner.evaluate import evaluate
from atoll.node.learning.model import bridge
from atoll.node.learning.model.bridge import named_atoms
from atoll.node.learning.model.decoder import Decoder, loss_of
from atoll.node.learning.outer.fixed import state_digest, to_float
from atoll.protocols.errors import ConfigError
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.model_spec import ModelSpec
from atoll.protocols.run.run_spec import RunSpec

WINDOWS, MAX_CONTEXT = 8, 128
"""About a thousand tokens give the mean bits per token to some tenths."""
TEXT_BYTES = 1 << 18
_SLAB = 1 << 12


class TokenizerFit(NamedTuple):
    """Loss in bits per token on the same windows of the validation text."""

    bits: float
    """Loss of the weights."""
    unigram_bits: float
    """Loss of the token frequencies of the training text."""

    def warning(self, without_fit: bool) -> str:
        """A line for the user, empty if all is well. Raises ConfigError for a misfit unless `without_fit`."""
        if self.bits <= self.unigram_bits:  # false for NaN too
            return ""
        line = (
            f"weights and tokenizer do not fit: on the run's text they need {self.bits:.2f} bits a token, "
            f"a mere count of its tokens {self.unigram_bits:.2f}"
        )
        if without_fit:
            return line
        hint = "take the tokenizer.json published with the weights and a text that they may know, or --without-fit"
        raise ConfigError(line, hint=hint)


def measure_fit(spec: RunSpec, weights: Path, tokenizer: bytes | None, path: str) -> TokenizerFit:
    """Measure the loss of the snapshot file `weights` on the run's text.

    `path` is the text of a `file:` source; `tokenizer` has the bytes of its file, None for a built-in one. Raises
    ConfigError, CorruptFault, DiskFault, Unreachable.
    """
    if spec.data.index is not None:
        raise ConfigError(
            "whether weights and a packed text fit is not measured", hint="make the run with --without-fit"
        )
    text = corpus.load_corpus(spec.data.source, path, default_cache())
    tokens: TextTokenizer = (
        built_in_tokenizer(spec.data.tokenizer, text.train)
        if tokenizer is None
        else open_tokenizer(tokenizer, spec.model.vocab)
    )
    windows_WT1 = _windows(tokens.encode(text.val[:TEXT_BYTES]), spec.model.context)
    nats = evaluate(_model(spec.model.base, weights), loss_of, windows_WT1, 1).val_loss
    unigram_bits = _unigram_bits(tokens.encode(text.train[:TEXT_BYTES]), windows_WT1[:, 1:], spec.model.vocab)
    return TokenizerFit(nats / math.log(2), unigram_bits)


def _windows(tokens_N: NDArray[np.int32], context: int) -> NDArray[np.int64]:
    """At most WINDOWS windows `[W, T + 1]`, int64, evenly spread. Raises ConfigError for too short a text."""
    length = min(context, MAX_CONTEXT, len(tokens_N) - 1)
    if length < 1:
        raise ConfigError("the run's text is too short: it has less than two tokens to validate with")
    at_W = np.linspace(0, len(tokens_N) - length - 1, WINDOWS).astype(np.int64)
    found: NDArray[np.int64] = tokens_N[np.unique(at_W)[:, None] + np.arange(length + 1)].astype(np.int64)
    return found


def _unigram_bits(train_N: NDArray[np.int32], target_WT: NDArray[np.int64], vocab: int) -> float:
    """Bits per target token under the training frequencies, with one added to each count (Laplace)."""
    count_V = np.bincount(train_N, minlength=vocab) + 1
    return float(np.log2(count_V.sum() / count_V[target_WT]).mean())


def _model(model: ModelSpec, weights: Path) -> Decoder:
    """The decoder with the weights of a snapshot file; read by slabs, so that memory holds them at most twice."""
    arena = arena_of(model)
    theta_C4096 = read_own_snapshot(weights, arena, state_digest).theta_C4096
    decoder = Decoder(model)
    named = named_atoms(decoder)
    for start in range(0, arena.chunks, _SLAB):
        bridge.write_rows(named, arena, start, to_float(theta_C4096[start : start + _SLAB]))
    return decoder
