"""The server as OpenAI's own client sees it, and as a stranger's page does; the model is a stand-in that obeys
LanguageModel's interface, its limits too."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from atoll.node.generation.options import Answer, TextOptions
from atoll.node.serving import app, turns
from atoll.node.serving.app import server_of
from atoll.node.serving.guard import refusal
from atoll.node.serving.requests import BODY_MAX_BYTES
from atoll.protocols.errors import ConfigError
from tests.later import openai
from tests.waiting import HANGS_S, poll


class Echo:
    """Writes the prompt again, a token a letter."""

    context = 64

    def __init__(self) -> None:
        self.has_template = False
        self.asked: list[TextOptions] = []
        self.letters_allowed = threading.Semaphore(10_000)
        self.letters = 0
        self.ended = threading.Event()

    def tokens_of(self, prompt: str) -> list[int]:
        return [ord(letter) for letter in prompt]

    def chat_tokens(self, messages: Sequence[dict[str, str]]) -> list[int]:
        if len(messages) > 5:
            raise ConfigError("the model's chat template failed: too many")
        return [ord(letter) for one in messages for letter in f"<{one['role']}>{one['content']}"]

    def generate(self, prompt: Sequence[int], options: TextOptions, emit: Callable[[str], object]) -> Answer:
        self.asked.append(options)
        try:
            if self.context - len(prompt) < 1:
                raise ConfigError(f"the prompt has {len(prompt)} tokens, and the model reads {self.context}")
            text = "".join(map(chr, prompt))[: min(options.max_tokens, self.context - len(prompt))]
            for letter in text:
                assert self.letters_allowed.acquire(timeout=HANGS_S)
                emit(letter)
                self.letters += 1
            return Answer(text, len(prompt), len(text), "stop" if len(text) == len(prompt) else "length")
        finally:
            self.ended.set()


@pytest.fixture
def model() -> Echo:
    return Echo()


@pytest.fixture
def address(model) -> Iterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    server = server_of(model, "tiny")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    model.letters_allowed.release(10_000)
    server.should_exit = True
    thread.join(HANGS_S)
    assert not thread.is_alive()
    listener.close()


@pytest.fixture
def client(address) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANGS_S) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_completion(client, model):
    said = client.completions.create(model="any", prompt="To be", max_tokens=3, temperature=0.5, seed=7, stop="x")
    assert (said.object, said.model, said.choices[0].text) == ("text_completion", "tiny", "To ")
    assert said.choices[0].finish_reason == "length"
    assert (said.usage.prompt_tokens, said.usage.completion_tokens, said.usage.total_tokens) == (5, 3, 8)
    assert model.asked == [TextOptions(3, 0.5, None, None, 7, ("x",))]


def test_a_completion_as_a_stream(client):
    chunks = list(client.completions.create(model="any", prompt="To be", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "To be"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 5 + ["stop"]


def test_a_chat_without_a_template_is_lines(client, model):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    said = client.chat.completions.create(model="any", messages=messages)
    assert said.choices[0].message.content == "User: hello\nAssistant:"
    assert said.choices[0].message.role == "assistant"
    assert model.asked[0].stop == ("\nUser:",)


def test_a_chat_in_the_model_s_template_as_a_stream(client, model):
    model.has_template = True
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    chunks = list(
        client.chat.completions.create(
            model="any", messages=messages, stream=True, stream_options={"include_usage": True},
            max_completion_tokens=9,
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "<system>a"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 9)
    assert model.asked[0].stop == ()


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_an_error_of_the_api_before_the_first_piece(client, stream):
    for prompt, line in (("x" * 64, "the prompt has 64 tokens, and the model reads 64"),):
        with pytest.raises(openai.BadRequestError) as found:
            client.completions.create(model="any", prompt=prompt, stream=stream)
        assert found.value.body["message"] == line
        assert found.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 3}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"temperature": 3}, None),
        ({"max_tokens": 0}, None),
        ({"prompt": ["a", "b"]}, None),
        ({"prompt": None}, None),
        ({"stop": ["a"] * 5}, None),
    ],
)
def test_bad_values_are_named(client, more, parameter):
    with pytest.raises(openai.BadRequestError) as found:
        client.completions.create(**{"model": "any", "prompt": "a"} | more)
    assert found.value.param == parameter
    # Neutral ones are what many clients send.
    neutral = {"n": 1, "logit_bias": {}, "user": "ada", "presence_penalty": 0}
    assert client.completions.create(model="any", prompt="a", **neutral).choices[0].text == "a"


def test_a_template_that_fails_is_one_line(client, model):
    model.has_template = True
    with pytest.raises(openai.BadRequestError, match="chat template failed"):
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}] * 6)


REFUSED_S = 30.0
"""What is refused at once is refused within this, on the busiest machine."""
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (JSON, b"{", 400),
        (JSON, b"[" * 100_000, 400),
        (JSON, b"\xff", 400),
        (JSON, b'"x"', 400),
        ({"content-type": "text/plain"}, b'{"prompt": "a"}', 400),
        (JSON, b'{"prompt": "' + b"a" * BODY_MAX_BYTES + b'"}', 400),
        (JSON | {"host": "evil.example"}, b'{"prompt": "a"}', 403),
        (JSON | {"origin": "https://evil.example"}, b'{"prompt": "a"}', 403),
        (JSON | {"origin": "http://localhost:3000"}, b'{"prompt": "a"}', 200),
        (JSON | {"host": "localhost:80"}, b'{"prompt": "a"}', 200),
    ],
)
def test_strangers(address, headers, body, status):
    found = httpx.post(f"{address}/v1/completions", content=body, headers=headers, timeout=HANGS_S)
    assert found.status_code == status
    assert (status == 200) == ("error" not in found.json())


def test_paths_and_methods_that_do_not_exist(address):
    assert httpx.get(f"{address}/v1/none", timeout=HANGS_S).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{address}/v1/completions", timeout=HANGS_S).status_code == 405


def test_a_client_that_goes_ends_its_text(address, model):
    """Another one need not wait for the rest of it."""
    model.letters_allowed = threading.Semaphore(1)
    body = {"prompt": "x" * 32, "stream": True}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=HANGS_S) as said:
        assert next(said.iter_lines()).startswith("data: ")

    def ended() -> bool:
        # Each letter is one more look at whether somebody still reads.
        model.letters_allowed.release()
        return model.ended.wait(0.05)

    poll("the text ends", ended)
    assert model.letters < 32


def test_so_many_may_wait(address, model, monkeypatch):
    monkeypatch.setattr(turns, "WAITING_MOST", 1)
    model.letters_allowed = threading.Semaphore(0)
    ask = partial(httpx.post, f"{address}/v1/completions", json={"prompt": "a"}, timeout=HANGS_S)
    with ThreadPoolExecutor() as threads:
        first = threads.submit(ask)
        poll("the first one is written", lambda: model.asked)
        try:
            second = threads.submit(ask).result(REFUSED_S)
        finally:
            model.letters_allowed.release(2)
        assert (second.status_code, second.headers["retry-after"]) == (429, "2")
        assert first.result(HANGS_S).status_code == 200
    assert ask().status_code == 200


def test_a_request_that_never_ends_is_given_up(address, monkeypatch):
    monkeypatch.setattr(app, "BODY_S", 0.1)
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=REFUSED_S) as stranger:
        stranger.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        assert stranger.recv(1000).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8080", "[::1]:8080", "LOCALHOST:1"])
def test_names_of_this_machine(host):
    assert refusal(host, None) is None
    assert refusal(host, f"http://{host}") is None


@pytest.mark.parametrize("host", ["", "localhost.evil.example", "127.0.0.1.nip.io", "0.0.0.0", "[::1", "evil@x"])
def test_names_that_are_not(host):
    assert refusal(host, None)
    assert refusal("localhost", f"http://{host}")
    assert refusal("localhost", "null")


def test_the_order_is_that_of_the_requests(model):
    """One text at a time; each client gets its own."""

    async def both() -> list[str]:
        queue = turns.WriterQueue(model)

        async def text(prompt: str) -> str:
            written = [piece async for piece in queue.write(lambda: model.tokens_of(prompt), TextOptions())]
            return json.dumps([piece if isinstance(piece, str) else piece.text for piece in written])

        found = await asyncio.gather(text("ab"), text("cd"))
        queue.close()
        return found

    assert asyncio.run(both()) == ['["a", "b", "ab"]', '["c", "d", "cd"]']
