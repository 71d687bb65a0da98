"""ServingSpec: facts for programs that run the trained model; training never uses them."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from atoll.protocols import codec
from atoll.protocols.errors import ConfigError

TEMPLATE_MAX_BYTES = 16 << 10
"""Largest chat template, in bytes: the run's file has 64 KiB at most and may list members, too."""
MAX_ENDS = 64
"""Most end tokens."""
_Real: TypeAlias = Annotated[float, Meta(ge=0, le=1000)]


class TokensSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Ids of the tokenizer's special tokens."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    unk: int | None = None


class SamplingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Sampling settings of the model's publisher, named as in transformers; None: not specified."""

    do_sample: bool | None = None
    temperature: _Real | None = None
    top_p: _Real | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 22)] | None = None
    repetition_penalty: _Real | None = None


class ServingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Special tokens, chat template and sampling of the trained model. No node runs the template."""

    bos: int | None = None
    eos: Annotated[tuple[int, ...], Meta(max_length=MAX_ENDS)] = ()
    """Tokens at each of which a generation stops."""
    pad: int | None = None
    tokens: TokensSpec = TokensSpec()
    chat_template: str = ""
    sampling: SamplingSpec = SamplingSpec()

    def check(self, vocab: int) -> None:
        """Raise ConfigError for ids outside the model's vocabulary, and for values that are too large."""
        _check_template(self.chat_template)
        codec.check_types(self, "serving.")
        if len(set(self.eos)) < len(self.eos):
            raise ConfigError("serving.eos: each id once")
        named = (self.tokens.bos, self.tokens.eos, self.tokens.pad, self.tokens.unk)
        for token in (self.bos, *self.eos, self.pad, *named):
            if token is not None and not 0 <= token < vocab:
                raise ConfigError(f"serving: {token} is no token of a model that has {vocab}")


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
