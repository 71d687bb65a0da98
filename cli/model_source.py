"""Options that name the weights to use, and the model that they name."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.options import average_option, home_option, run_option
from atoll.node.config.home import Home
from atoll.node.import_export.source_options import local_folder
from atoll.protocols.errors import ConfigError

if TYPE_CHECKING:
    from atoll.node.generation.language_model import LanguageModel

_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
SOURCE = (
    home_option,
    run_option,
    average_option,
    click.option("--from-hf", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Instead of a run."),
    click.option("--data", metavar="PATH", help="The text of a run whose source is file:."),
    click.option("--device", default="cpu", show_default=True, metavar="DEVICE", help="cpu, cuda, cuda:1."),
)
"""The arguments of `open_model`, as options."""


def open_model(
    home: Home,
    wanted: str | None,
    *,
    average: bool = False,
    folder: Path | None = None,
    data: str | None = None,
    device: str = "cpu",
) -> "LanguageModel":
    """The newest final weights of a run, with `average` their average, or those of a folder.

    Says on stderr which these are. Raises ConfigError, also where the packages of the extra are missing,
    CorruptFault, DiskFault.
    """
    if folder is None:
        from atoll.node.config.node_config import load_config
        from atoll.node.runs.run_files import find_run, text_path
        from atoll.p2p.blobs.store import BLOBS

        run = find_run(home, wanted)  # before torch: a run that is not there is said at once
        run.spec.model.check_decoder()
        from atoll.node.import_export.export_run import saved_weights

        run_folder, config = home.run(run.spec.id), load_config(home.config_toml, {"data": data})
        weights = saved_weights(run.spec, run_folder, average=average)
    elif average:
        raise ConfigError("--average is of a run", hint="drop --average or --from-hf")
    else:
        local_folder(folder)
    if sys.stderr.isatty():
        click.echo("loading …", err=True)
    try:
        from atoll.node.generation import loading
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "jinja2"):
            raise
        raise ConfigError("text needs the package transformers", hint="pip install 'atoll[generate]'") from error
    if folder is None:
        text = text_path(home, run.spec.id, config.data)
        model = loading.load_run(run.spec, weights, run_folder / BLOBS, text, device)
    else:
        model = loading.load_model_folder(folder, device)
    click.echo(model.about, err=True)
    return model


def printable(text: str) -> str:
    """A model's text for a terminal, which would obey control characters."""
    return text.translate(_CONTROL)
