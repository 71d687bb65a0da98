"""ServingSpec: what programs that run the trained model must know of it, and training never uses."""

import math

import msgspec

from atoll.protocols.errors import ConfigError

TEMPLATE_MAX_BYTES = 16 << 10
"""The run's file has 64 KiB at most: the template fits beside all members that may be listed."""
MAX_ENDS = 64


class TokensSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Ids of the tokens that the tokenizer calls by these names."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """How its publisher draws from the model; None: not said. Names are those of transformers."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None

    def check(self) -> None:
        """Raise ConfigError for what is no way to draw."""
        reals = (self.temperature, self.top_p, self.repetition_penalty)
        if not all(value is None or (math.isfinite(value) and 0 <= value <= 1000) for value in reals):
            raise ConfigError(
                "serving.sampling: temperature, top_p and repetition_penalty must be within 0 … 1000"
            )
        if self.top_k is not None and not 0 <= self.top_k <= 1 << 22:
            raise ConfigError(f"serving.sampling.top_k = {self.top_k} is outside 0 … {1 << 22}")


class ServingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Where a generation begins and ends, and how a conversation is written. Data: no node runs the template."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    """A generation stops at any of them."""
    pad: int | None = None
    tokens: TokensSpec = TokensSpec()
    chat_template: str = ""
    sampling: SamplingSpec = SamplingSpec()

    def check(self, vocab: int) -> None:
        """Raise ConfigError for ids that are no tokens of the model, and for what is too large."""
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
