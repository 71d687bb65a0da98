"""Replies of OpenAI's API as plain objects: completions, chunks of a stream, models, errors. Pure."""

from dataclasses import dataclass
from typing import Any, Literal

from atoll.node.generation.options import Answer

Kind = Literal["chat", "text"]
_OBJECT = {"chat": "chat.completion", "text": "text_completion"}
_CHUNK = {"chat": "chat.completion.chunk", "text": "text_completion"}


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What all objects of one reply share."""

    kind: Kind
    id: str
    created: int
    """Unix seconds."""
    model: str

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The reply to a request without `stream`."""
        said: dict[str, Any] = {"text": answer.text}
        if self.kind == "chat":
            said = {"message": {"role": "assistant", "content": answer.text}}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": answer.finish}
        return self._fields(_OBJECT) | {"choices": [choice], "usage": usage_of(answer)}

    def begin(self) -> list[dict[str, Any]]:
        """Chunks before the first text: of a chat, who speaks."""
        return [self._chunk({"delta": {"role": "assistant", "content": ""}})] if self.kind == "chat" else []

    def piece(self, text: str) -> dict[str, Any]:
        """A chunk with the next piece of text."""
        return self._chunk({"delta": {"content": text}} if self.kind == "chat" else {"text": text})

    def end(self, answer: Answer, *, with_usage: bool) -> list[dict[str, Any]]:
        """Chunks after the last text: why it ended, and how many tokens there were."""
        last = self._chunk({"delta": {}} if self.kind == "chat" else {"text": ""}, answer.finish)
        counted = self._fields(_CHUNK) | {"choices": [], "usage": usage_of(answer)}
        return [last, counted] if with_usage else [last]

    def _chunk(self, said: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._fields(_CHUNK) | {"choices": [choice]}

    def _fields(self, kinds: dict[str, str]) -> dict[str, Any]:
        return {"id": self.id, "object": kinds[self.kind], "created": self.created, "model": self.model}


def usage_of(answer: Answer) -> dict[str, int]:
    """Tokens of a reply."""
    total = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}


def model_list(name: str, created: int) -> dict[str, Any]:
    """Reply to `GET /v1/models`."""
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "created": created, "owned_by": "atoll"}],
    }


def error_of(message: str, kind: str, *, parameter: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as the clients of the API read it."""
    return {"error": {"message": message, "type": kind, "param": parameter, "code": code}}
