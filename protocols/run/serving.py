"""ServingSpec: facts for programs that run the trained model; training never uses them."""

import math

import msgspec

from atoll.protocols.errors import ConfigError

TEMPLATE_MAX_BYTES = 16 << 10
"""Largest chat template, in bytes: the run's file has 64 KiB at most and may list members, too."""
MAX_ENDS = 64
"""Most end tokens."""


class TokensSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Ids of the tokenizer's special tokens."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Sampling settings of the model's publisher, named as in transformers; None: not specified."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    def check(self) -> None:
        """Raise ConfigError for values with which no token can be sampled."""
        reals = (self.temperature, self.top_p, self.repetition_penalty)
        if not all(value is None or (math.isfinite(value) and 0 <= value <= 1000) for value in reals):
            raise ConfigError(
                "serving.sampling: temperature, top_p and repetition_penalty must be within 0 … 1000"
            )
        if self.top_k is not None and not 0 <= self.top_k <= 1 << 22:
            raise ConfigError(f"serving.sampling.top_k = {self.top_k} is outside 0 … {1 << 22}")


class ServingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Special tokens, chat template and sampling of the trained model. No node runs the template."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """Tokens at each of which a generation stops."""
    pad: int | None = None
    tokens: TokensSpec = TokensSpec()
    chat_template: str = ""
    sampling: SamplingSpec = SamplingSpec()

    def check(self, vocab: int) -> None:
        """Raise ConfigError for ids outside the model's vocabulary, and for values that are too large."""
        if len(self.eos) > MAX_ENDS or len(set(self.eos)) < len(self.eos):
            raise ConfigError(f"serving.eos: at most {MAX_ENDS} ids, each once")
        named = (self.tokens.bos, self.tokens.eos, self.tokens.pad, self.tokens.unk)
        for token in (self.bos, *self.eos, self.pad, *named):
            if token is not None and not 0 <= token < vocab:
                raise ConfigError(f"serving: {token} is no token of a model that has {vocab}")
        _check_template(self.chat_template)
        self.sampling.check()


def _check_template(text: str) -> None:
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise ConfigError("serving.chat_template is no text") from error
    if size_bytes > TEMPLATE_MAX_BYTES:
        raise ConfigError(
            f"serving.chat_template has more than {TEMPLATE_MAX_BYTES >> 10} KiB",
            hint="take the template out of the folder, and put it back into what you export",
        )
