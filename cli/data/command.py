"""`atoll data`: packs texts into shards that members fetch from each other."""

import math
from pathlib import Path

import click

from atoll.cli.formatting import number, print_json, size
from atoll.cli.options import json_option
from atoll.cli.progress_line import ProgressLine
from atoll.node.runs.packs import read_pack
from atoll.protocols.data.file_source import COLUMN, FileSource, read_filters
from atoll.protocols.errors import ConfigError, counted
from atoll.protocols.ids import short

SHARD_TOKENS = 1 << 20
HOLDOUT = 0.05
MIN_SHARD_TOKENS = 4096


@click.group()
def data() -> None:
    """Pack texts into shards of tokens that members fetch from each other."""


@data.command()
@click.argument("sources", nargs=-1, required=True, metavar="TEXT…")
@click.option("--out", "to", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new folder.")
@click.option("--weights", metavar="W,W,…", help="Ratio of the texts' tokens; absent: all of each text.")
@click.option("--column", metavar="NAME", default=COLUMN, help="Of rows, where the text is; text if absent.")
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only rows that say so count.")
@click.option("--tokenizer", default="bytes", metavar="bytes|bpe8k|FILE", help="FILE: a tokenizer.json.")
@click.option(
    "--shard-tokens",
    default=SHARD_TOKENS,
    type=click.IntRange(MIN_SHARD_TOKENS, 1 << 26),
    help="About so many tokens a shard.",
)
@click.option(
    "--holdout", default=HOLDOUT, type=click.FloatRange(0.0001, 0.5), help="Share that is held out for validation."
)
@click.option("--seed", default=0, type=click.IntRange(0), help="Of the order of the documents.")
@json_option
def pack(
    sources: tuple[str, ...],
    to: Path,
    weights: str | None,
    column: str,
    where: tuple[str, ...],
    tokenizer: str,
    shard_tokens: int,
    holdout: float,
    seed: int,
    as_json: bool,
) -> None:
    """Pack texts once: then no other member needs a copy of them.

    TEXT is a file, a folder or a 'PATTERN', or hf:NAME?config=…&split=… of the Hugging Face Hub.
    """
    filters = read_filters(list(where), column)
    ratio = _weights(weights, len(sources)) if weights is not None else None
    from atoll.node.learning.data import pack as packing  # numpy and tokenizers: not for --help

    parts = packing.text_parts(sources, ratio, FileSource("", column, filters))
    options = packing.PackOptions(tokenizer, shard_tokens, holdout, seed)
    with ProgressLine("packing", quiet=as_json) as line:

        def report(work: str, done: int, of: int, is_bytes: bool) -> None:
            line.begin(work)
            line.show(done, of, is_bytes=is_bytes)

        found = packing.pack(parts, to, options, report)
    if as_json:
        print_json(_shown(to) | {"shares": found.shares, "left_out": found.left_out})
        return
    for part, share in zip(parts, found.shares, strict=True):
        if share < 1:
            click.echo(f"{part.name}: {share:.1%} of its text is taken")
    if found.left_out:
        click.echo(f"{number(found.left_out)} held-out tokens are in no file: a smaller --holdout is enough")
    _print(to)
    click.echo(f"next: atoll run new NAME --data {to}")


@data.command()
@click.argument("folder", type=click.Path(path_type=Path))
@json_option
def show(folder: Path, as_json: bool) -> None:
    """Show what a packed text holds."""
    if as_json:
        print_json(_shown(folder))
    else:
        _print(folder)


def _weights(text: str, count: int) -> tuple[float, ...]:
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--weights {text}: not numbers", hint="for example --weights 3,1") from error
    if len(found) != count or not all(0 < each < math.inf for each in found):
        raise ConfigError(
            f"--weights {text}: {count} numbers above 0 are needed", hint="one for each text, in order"
        )
    return found


def _shown(folder: Path) -> dict[str, object]:
    index, name = read_pack(folder)
    return {
        "index": name,
        "vocab": index.vocab,
        "shards": index.count,
        "shard_tokens": index.shard_tokens,
        "shard_bytes": index.shard_bytes,
        "tokens": index.count * index.shard_tokens,
        "held_out_tokens": index.held_out_tokens,
    }


def _print(folder: Path) -> None:
    index, name = read_pack(folder)
    click.echo(f"{folder}: packed text {short(name)}")
    click.echo(
        f"  {number(index.count * index.shard_tokens, 0)} tokens in {counted(index.count, 'shard')} "
        f"of {size(index.shard_bytes)}, vocabulary {index.vocab}"
    )
    click.echo(f"  {number(index.held_out_tokens, 0)} tokens held out")
