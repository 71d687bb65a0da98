"""A model and its tokenizer in `transformers`, which has the KV cache, the sampling and the chat templates."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation.streamers import BaseStreamer

from atoll.node.generation.conversation import Message
from atoll.node.generation.options import TEMPERATURE, Answer, TextOptions
from atoll.node.generation.stop_text import StopText
from atoll.protocols.errors import ConfigError


class LanguageModel:
    """Weights and tokenizer of one model, ready to write."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, about: str) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self.about = about
        """Which weights these are, for people."""
        self.context: int = model.config.max_position_embeddings
        """Most tokens of a prompt and its answer together."""
        self.has_template = bool(tokenizer.chat_template)

    def tokens_of(self, prompt: str) -> list[int]:
        """The tokens of a prompt; of an empty one, a token that may begin a text."""
        first = self._tokenizer.bos_token or "\n"
        return list(self._tokenizer(prompt)["input_ids"] or self._tokenizer(first)["input_ids"])

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation in the model's template. Raises ConfigError where the template fails."""
        turns = list(messages)
        try:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError, TypeError) as error:
            raise ConfigError(f"the model's chat template failed: {error}") from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(
        self, prompt: Sequence[int], options: TextOptions, emit: Callable[[str], object] = lambda _: None
    ) -> Answer:
        """Write after `prompt`; `emit` gets the text piece by piece. Raises ConfigError where there is no room."""
        room = self.context - len(prompt)
        if room < 1:
            raise ConfigError(f"the prompt has {len(prompt)} tokens, and the model reads {self.context}")
        torch.manual_seed(torch.seed() if options.seed is None else options.seed)
        config = _config(self._model.generation_config, options, min(options.max_tokens, room))
        pieces = _Pieces(self._tokenizer, config.eos_token_id, StopText(options.stop), emit)
        ids_BT = torch.tensor([list(prompt)], device=self._model.device)
        with contextlib.suppress(_EnoughError):
            self._model.generate(
                ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config, streamer=pieces
            )
        return Answer(pieces.rest(), len(prompt), pieces.count, "stop" if pieces.over else "length")


def _config(own: GenerationConfig, options: TextOptions, max_tokens: int) -> GenerationConfig:
    """The publisher's sampling and end tokens under the user's options; nothing else of the publisher's."""
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if own.do_sample is False else own.temperature or TEMPERATURE
    chosen: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        top_p = own.top_p if options.top_p is None else options.top_p
        top_k = own.top_k if options.top_k is None else options.top_k
        chosen |= {"temperature": temperature, "top_p": 1.0 if top_p is None else top_p, "top_k": top_k or 0}
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    chosen |= {"eos_token_id": ends, "pad_token_id": ends[0]} if ends[0] is not None else {}
    return GenerationConfig(max_new_tokens=max_tokens, repetition_penalty=own.repetition_penalty, **chosen)


class _EnoughError(Exception):
    """Ends a generation from within."""


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Turns tokens into text as they come: whole characters, no end token, nothing from a stop text on."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        ends: Sequence[int] | None,
        stop: StopText,
        emit: Callable[[str], object],
    ) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._decode = DecodeStream(skip_special_tokens=True)
        self._ends = frozenset(ends or ())
        self._stop = stop
        self._emit = emit
        self._kept: list[int] = []
        self._decoded = ""
        self._text = ""
        self.count = -1  # the first of transformers' calls brings the prompt
        self.over = False
        """Whether the model or a stop text ended it."""

    def put(self, value: Tensor) -> None:
        """The next token. Raises _EnoughError after the last one."""
        self.count += 1
        if self.count == 0:
            return
        token = int(value.reshape(-1)[-1])
        if token not in self._ends:
            self._kept.append(token)
            text = self._decode.step(self._tokenizer, token) or ""
            self._decoded += text
            self._pass_on(self._stop.feed(text))
        self.over = self._stop.found or token in self._ends
        if self.over:
            raise _EnoughError

    def end(self) -> None:
        """Of transformers; `rest` is called also where it is not."""

    def rest(self) -> str:
        """The whole text. Its last bytes may be no character: they are shown as the tokenizer shows them."""
        whole = self._tokenizer.decode(self._kept, skip_special_tokens=True)
        if whole.startswith(self._decoded):
            self._pass_on(self._stop.feed(whole[len(self._decoded) :]))
        self._pass_on(self._stop.rest())
        return self._text

    def _pass_on(self, text: str) -> None:
        self._text += text
        if text:
            self._emit(text)
