"""Requests of OpenAI's API: JSON in, a prompt and options out, or the error that its clients understand. Pure.

Source: the API reference of OpenAI, `chat/completions` and `completions`. What cannot be done here is refused by
name, unless the request asks for its neutral value; keys that are not known are not looked at, as servers of this
API do: clients send what their authors added since.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from atoll.node.generation.options import MAX_TOKENS, TextOptions

BODY_MAX_BYTES = 1 << 20
MESSAGES_MOST = 4096
STOPS_MOST = 4
"""As OpenAI has it."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}
"""Keys that this server cannot do, and what they may say all the same; null always."""
T = TypeVar("T", "ChatRequest", "TextRequest")


class BadRequest(Exception):
    """A request that is answered with status 400; `parameter` names the key."""

    def __init__(self, message: str, parameter: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.code = code


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None


class MessagePart(msgspec.Struct, frozen=True):
    """A part of a message; only text is understood."""

    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[MessagePart], Meta(max_length=MESSAGES_MOST)]

    def turn(self) -> dict[str, str]:
        """As chat templates read it. `developer` is OpenAI's newer word for `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of requests have."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    """Not OpenAI's; servers of open models have it."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=STOPS_MOST)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the count of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self, most: int | None = None) -> TextOptions:
        """How to choose tokens and when to stop. `most`: another limit of tokens than `max_tokens`."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return TextOptions(
            max_tokens=most or self.max_tokens or MAX_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=stops,
        )


class ChatRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_MOST)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextRequest(Sampling, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`; one prompt, as text."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=1)]

    @property
    def text(self) -> str:
        """The prompt."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]


def read_request(body: bytes, kind: type[T]) -> T:
    """The request in `body`. Raises BadRequest."""
    try:
        raw = msgspec.json.decode(body)
        if isinstance(raw, dict):
            for key, legal in _NEUTRAL.items():
                if raw.get(key) is not None and raw[key] not in legal:
                    raise BadRequest(f"{key} is not supported here", key)
        return msgspec.convert(raw, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"the request is not valid: {error}") from error
