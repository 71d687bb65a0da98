"""`export`: the weights of a run for other programs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import average_option, home_option, json_option, run_option
from atoll.cli.progress_line import ProgressLine
from atoll.node.config.home import Home
from atoll.protocols.errors import ConfigError

if TYPE_CHECKING:
    from atoll.node.import_export.export_run import Exported

_OPTIONS = (
    home_option,
    json_option,
    run_option,
    click.option(
        "--snapshot", type=click.Path(path_type=Path), metavar="FILE", help="Instead of the newest state."
    ),
    average_option,
    click.option("--data", metavar="PATH", help="The text of a run whose source is file:."),
    click.option("--force", is_flag=True, help="Replace an export that is there."),
)


def _export_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group()
def export() -> None:
    """Write the weights of a run for other programs."""


@export.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@_export_options
def hf(folder: Path, **options: Any) -> None:
    """Write DIR as `transformers` reads it: config, safetensors, tokenizer, model card. No node needs to run."""

    def load() -> "Callable[..., Exported]":
        from atoll.node.import_export.export_run import export_run

        return export_run

    _export(load, folder, **options)


@export.command()
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@_export_options
def gguf(file: Path, **options: Any) -> None:
    """Write FILE as llama.cpp reads it: a dense model's weights and tokenizer. No node needs to run."""

    def load() -> "Callable[..., Exported]":
        try:
            from atoll.node.import_export.export_gguf import export_gguf
        except ModuleNotFoundError as error:
            if error.name != "gguf":
                raise
            raise ConfigError(
                "`atoll model export gguf` needs the package gguf", hint="pip install 'atoll[gguf]'"
            ) from error
        return export_gguf

    _export(load, file, **options)


@export.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--base", metavar="NAME", help="Folder or hub name of the weights that the run was made from.")
@_export_options
def peft(folder: Path, base: str | None, **options: Any) -> None:
    """Write DIR as `peft` reads it: the adapter of a LoRA run, without its base. No node needs to run."""

    def load() -> "Callable[..., Exported]":
        from atoll.node.import_export.export_adapter import export_adapter

        return partial(export_adapter, base=base)

    _export(load, folder, **options)


def _export(
    load: "Callable[[], Callable[..., Exported]]",
    to: Path,
    *,
    home: Home,
    as_json: bool,
    wanted: str | None,
    snapshot: Path | None,
    average: bool,
    data: str | None,
    force: bool,
) -> None:
    """Write the newest state of a run, and say which round that is, and which newer one is not in it.

    `load` imports what writes, torch among it, once there is a run: without one the answer comes at once.
    """
    from atoll.cli.stopped_node import last_rows
    from atoll.node.config.node_config import load_config
    from atoll.node.runs.run_files import find_run, text_path

    found = find_run(home, wanted)
    config = load_config(home.config_toml, {"data": data})
    run_folder, rows = home.run(found.spec.id), last_rows(home, found)
    text = text_path(home, found.spec.id, config.data)
    with ProgressLine("writing", quiet=as_json) as line:
        write = partial(load(), rows=rows, average=average, replace=force, report=line.show)
        done = write(found.spec, run_folder, to, snapshot, text)
    newer = max((row.round for row in rows if row.final and row.round > done.round), default=None)
    model = found.spec.model
    parameters = (model if done.class_name == "PeftModel" else model.base).parameters
    if as_json:
        about = {"run": found.spec.id.hex(), "path": str(to), "class": done.class_name, "parameters": parameters}
        print_json(about | {"round": done.round, "digest": done.state.hex(), "newer": newer})
        return
    click.echo(f"{to}: {done.class_name}, {parameters:,} parameters, round {done.round}, {done.state.hex()[:16]}")
    if newer is not None:
        click.echo(f"round {newer} is final too, and not in it: this node has not saved it yet", err=True)
