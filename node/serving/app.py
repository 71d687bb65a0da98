"""The HTTP application: routes of OpenAI's API, on Starlette. Served by uvicorn."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from atoll.node.generation.conversation import PLAIN_STOP, plain_prompt
from atoll.node.generation.options import Answer, TextOptions
from atoll.node.serving.guard import LoopbackOnly
from atoll.node.serving.replies import Kind, ReplyHead, error_of, model_list
from atoll.node.serving.requests import (
    BODY_MAX_BYTES,
    BadRequest,
    ChatRequest,
    Sampling,
    TextRequest,
    read_request,
)
from atoll.node.serving.turns import Busy, Writer, WriterQueue
from atoll.protocols.errors import AtollError

BODY_S = 30.0
"""Longest time that a client takes to send its request."""
STOPPING_S = 3
"""Time that replies have to end when the server is told to stop."""
log = logging.getLogger(__name__)


def server_of(model: Writer, name: str) -> uvicorn.Server:
    """A server of the application; its `run(sockets=[…])` answers until SIGINT or SIGTERM."""
    config = uvicorn.Config(
        application(model, name),
        log_level="error",
        access_log=False,
        lifespan="on",
        timeout_graceful_shutdown=STOPPING_S,
        server_header=False,
    )
    return uvicorn.Server(config)


def application(model: Writer, name: str) -> Starlette:
    """The routes for one model, which clients see under `name`."""
    turns, began = WriterQueue(model), int(time.time())

    async def models(_: Request) -> Response:
        return JSONResponse(model_list(name, began))

    async def chat(request: Request) -> Response:
        asked = read_request(await _body(request), ChatRequest)
        messages = [message.turn() for message in asked.messages]
        options = asked.options(asked.max_completion_tokens)
        if model.has_template:
            return await answered(request, "chat", asked, options, lambda: model.chat_tokens(messages))
        options = options._replace(stop=(*options.stop, PLAIN_STOP))
        return await answered(request, "chat", asked, options, lambda: model.tokens_of(plain_prompt(messages)))

    async def text(request: Request) -> Response:
        asked = read_request(await _body(request), TextRequest)
        return await answered(request, "text", asked, asked.options(), lambda: model.tokens_of(asked.text))

    async def answered(
        request: Request, kind: Kind, asked: Sampling, options: TextOptions, prompt: Callable[[], Sequence[int]]
    ) -> Response:
        reply_id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
        head = ReplyHead(kind, reply_id, int(time.time()), name)
        written = turns.write(prompt, options)
        # What is wrong with a request shows before its first piece: then it has a status of its own.
        first = await anext(written)
        if asked.stream:
            events = _events(head, first, written, with_usage=asked.with_usage)
            return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        async with aclosing(written):
            while not isinstance(first, Answer):
                if await request.is_disconnected():
                    raise ClientDisconnect
                first = await anext(written)
        return JSONResponse(head.whole(first))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        turns.close()

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/completions", text, methods=["POST"]),
        ],
        middleware=[Middleware(LoopbackOnly)],
        exception_handlers={
            BadRequest: _bad_request,
            AtollError: _not_possible,
            Busy: _busy,
            ClientDisconnect: _nobody,
            HTTPException: _http_error,
            Exception: _bug,
        },
        lifespan=lifespan,
    )


async def _events(
    head: ReplyHead, first: str | Answer, written: AsyncGenerator[str | Answer], *, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events of one reply."""
    async with aclosing(written):
        for chunk in head.begin():
            yield _event(chunk)
        piece = first
        while not isinstance(piece, Answer):
            yield _event(head.piece(piece))
            piece = await anext(written)
        for chunk in head.end(piece, with_usage=with_usage):
            yield _event(chunk)
        yield "data: [DONE]\n\n"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


async def _body(request: Request) -> bytes:
    """The body, of bounded size, in bounded time. Raises BadRequest."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # Also a wall: without it, a page of any site could post here from this machine's browser.
        raise BadRequest("the content type must be application/json")
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > BODY_MAX_BYTES:
                    raise BadRequest(f"a request has at most {BODY_MAX_BYTES} bytes")
    except TimeoutError as error:
        raise BadRequest(f"the request took more than {BODY_S:.0f} s") from error
    return bytes(body)


async def _bad_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    said = error_of(str(error), "invalid_request_error", parameter=error.parameter, code=error.code)
    return JSONResponse(said, 400)


async def _not_possible(_: Request, error: Exception) -> Response:
    assert isinstance(error, AtollError)
    return JSONResponse(error_of(error.line(), "invalid_request_error"), 400)


async def _busy(_: Request, __: Exception) -> Response:
    said = error_of("too many requests wait for this model", "rate_limit_error", code="rate_limit_exceeded")
    return JSONResponse(said, 429, {"retry-after": "2"})


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the number is nginx's


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_of(error.detail, "invalid_request_error"), error.status_code)


async def _bug(_: Request, error: Exception) -> Response:
    log.error("a request could not be answered", exc_info=error)
    return JSONResponse(error_of("a fault of the server; its output has more", "server_error"), 500)
