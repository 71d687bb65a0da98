"""`export`: the weights of a run for other programs."""

from pathlib import Path

import click

from atoll.cli.formatting import print_json
from atoll.cli.options import home_option, json_option, run_option
from atoll.node.config.home import Home


@click.group()
def export() -> None:
    """Write the weights of a run for other programs."""


@export.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@home_option
@json_option
@run_option
@click.option("--snapshot", type=click.Path(path_type=Path), metavar="FILE", help="Instead of the newest state.")
@click.option("--data", metavar="PATH", help="The text of a run whose source is file:.")
@click.option("--force", is_flag=True, help="Replace an export that is there.")
def hf(
    folder: Path,
    home: Home,
    as_json: bool,
    wanted: str | None,
    snapshot: Path | None,
    data: str | None,
    force: bool,
) -> None:
    """Write DIR as `transformers` reads it: config, safetensors, tokenizer, model card. No node needs to run."""
    from atoll.cli.stopped_node import last_rows
    from atoll.node.config.node_config import load_config
    from atoll.node.import_export.export_run import export_run
    from atoll.node.runs.run_files import find_run, text_path

    found = find_run(home, wanted)
    config = load_config(home.config_toml, {"data": data})
    run_folder, rows = home.run(found.spec.id), last_rows(home, found)
    text = text_path(home, found.spec.id, config.data)
    done = export_run(found.spec, run_folder, folder, snapshot, text, rows=rows, replace=force)
    newer = max((row.round for row in rows if row.final and row.round > done.round), default=None)
    parameters = found.spec.model.parameters
    if as_json:
        about = {
            "run": found.spec.id.hex(),
            "path": str(folder),
            "class": done.class_name,
            "parameters": parameters,
        }
        print_json(about | {"round": done.round, "digest": done.state.hex(), "newer": newer})
        return
    click.echo(
        f"{folder}: {done.class_name}, {parameters:,} parameters, round {done.round}, {done.state.hex()[:16]}"
    )
    if newer is not None:
        click.echo(f"round {newer} is final too, and not in it: this node has not saved it yet", err=True)
