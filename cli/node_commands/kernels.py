"""`node kernels`: compiles what a worker would compile at its first start, for an image or a quick first start."""

import itertools
import time

import click

from atoll.cli.formatting import print_json, span
from atoll.cli.options import home_option, json_option
from atoll.cli.progress_line import ProgressLine
from atoll.node.config.home import Home


@click.command()
@home_option
@json_option
def kernels(home: Home, as_json: bool) -> None:
    """Compile the kernels now: the first start after an install then only loads them."""
    from atoll.node.worker.schedule import precompile  # torch and the compiler: not for --help

    count, done, began_s = precompile.PART_COUNT, itertools.count(1), time.monotonic()
    with ProgressLine("compiling kernels", quiet=as_json) as line:
        for codec in precompile.all_codecs():
            precompile.warm(codec, lambda part: line.show(next(done), count))
    took_s = time.monotonic() - began_s
    if as_json:
        print_json({"parts": count, "took_s": took_s})
        return
    click.echo(f"kernels are compiled: {count} parts in {span(took_s)}")
