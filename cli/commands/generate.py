"""`generate` and `chat`: text from the newest final weights of a run, or from a Hugging Face folder."""

import readline  # noqa: F401 - `input` then edits lines
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.formatting import print_json
from atoll.cli.model_source import SOURCE, open_model, printable
from atoll.cli.options import json_option
from atoll.node.config.home import Home
from atoll.node.generation.conversation import PLAIN_STOP, Message, newest_that_fit, plain_prompt
from atoll.node.generation.options import MAX_TOKENS, TEMPERATURE, TextOptions
from atoll.protocols.errors import AtollError, counted

if TYPE_CHECKING:
    from atoll.node.generation.language_model import LanguageModel

_COUNT, _SUM = click.IntRange(min=1), click.FloatRange(0, 1, min_open=True)
_HEAT = f"0: the likeliest token each time; else as the model says, or {TEMPERATURE}."
_OPTIONS: tuple[Callable[..., Any], ...] = (
    *SOURCE,
    click.option("--max-tokens", type=_COUNT, default=MAX_TOKENS, show_default=True, help="Of an answer."),
    click.option("--temperature", type=click.FloatRange(0, 100), help=_HEAT),
    click.option("--top-p", type=_SUM, help="The likeliest tokens, up to this sum."),
    click.option("--top-k", type=click.IntRange(min=0), help="Only so many of the likeliest; 0: all."),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="The same seed gives the same text here."),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated."),
    json_option,
)


def _with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@click.argument("prompt")
@_with_options
def generate(prompt: str, as_json: bool, **chosen: Any) -> None:
    """Go on with PROMPT; `-` reads it from standard input. No node needs to run."""
    if prompt == "-":
        prompt = sys.stdin.read()
    model, options = _opened(**chosen)
    _written(model, model.tokens_of(prompt), options, as_json)


@click.command()
@_with_options
def chat(as_json: bool, **chosen: Any) -> None:
    """Talk with the model, line by line. Ctrl-D or Ctrl-C ends."""
    model, options = _opened(**chosen)
    if not model.has_template:
        click.echo("this model has no chat template: it continues lines of `User:` and `Assistant:`", err=True)
        options = options._replace(stop=(*options.stop, PLAIN_STOP))

    def tokens_of(messages: Sequence[Message]) -> list[int]:
        return model.chat_tokens(messages) if model.has_template else model.tokens_of(plain_prompt(messages))

    # Up to a quarter of the context is for the answer alone.
    most = max(1, model.context - min(options.max_tokens, model.context // 4))
    messages: list[Message] = []
    while (line := _line()) is not None:
        if not line.strip():
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            prompt, left_out = newest_that_fit(asked, tokens_of, most)
            if left_out:
                click.echo(f"the model forgets the oldest {counted(left_out, 'message')}", err=True)
            answer = _written(model, prompt, options, as_json)
            messages = [*asked[left_out:], {"role": "assistant", "content": answer.strip()}]
        except AtollError as error:
            click.echo(f"error: {error.line()}", err=True)


def _opened(
    home: Home,
    wanted: str | None,
    average: bool,
    folder: Path | None,
    data: str | None,
    device: str,
    **sampling: Any,
) -> "tuple[LanguageModel, TextOptions]":
    model = open_model(home, wanted, average=average, folder=folder, data=data, device=device)
    return model, TextOptions(**sampling)


def _line() -> str | None:
    """The next line of the user; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def _written(model: "LanguageModel", prompt: list[int], options: TextOptions, as_json: bool) -> str:
    """Print the text as it comes, or all about it as JSON at the end; return it."""
    if as_json:
        answer = model.generate(prompt, options)
        print_json({"type": "text", "model": model.about} | answer._asdict())
        return answer.text
    shown = printable if sys.stdout.isatty() else str
    try:
        return model.generate(prompt, options, lambda text: click.echo(shown(text), nl=False)).text
    finally:
        click.echo()
