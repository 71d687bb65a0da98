"""Pages of the site that are in no file of docs/: the front pages, and references made from the code."""

import ast
import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import click
import msgspec

from atoll.cli.command_group import cli
from atoll.cli.command_table import COMMANDS
from atoll.protocols.run import admission, model_spec, run_spec, slices
from atoll.protocols.run.sections import (
    audits,
    compression,
    history,
    merging,
    objective,
    plugin,
    privacy,
    serving,
)
from atoll.protocols.run.sections.variants import gossip, sizes, staleness

ROOT = Path(__file__).resolve().parent.parent.parent
FRONT = {
    "README.md": "about.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "docker/README.md": "containers.md",
}
"""Pages of the repository outside docs/, and where the site has them."""
LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
SPECS = (
    run_spec.RunSpec,
    model_spec.ModelSpec,
    model_spec.ExpertsSpec,
    merging.MergeSpec,
    run_spec.DataSpec,
    run_spec.InnerSpec,
    run_spec.OuterSpec,
    run_spec.Stage,
    compression.CompressSpec,
    sizes.SizesSpec,
    run_spec.PaceSpec,
    admission.AdmissionSpec,
    slices.ReduceSpec,
    run_spec.StartSpec,
    serving.ServingSpec,
    staleness.StaleSpec,
    serving.TokensSpec,
    serving.SamplingSpec,
    audits.AuditSpec,
    history.HistorySpec,
    gossip.GossipSpec,
    objective.ObjectiveSpec,
    plugin.PluginSpec,
    plugin.TensorSpec,
    privacy.PrivacySpec,
)
REFERENCES = ("reference/commands.md", "reference/runspec.md")


def pages() -> dict[str, str]:
    """Text of each page by its place in the site."""
    front = {place: (ROOT / name).read_text(encoding="utf-8") for name, place in FRONT.items()}
    licence = dedent((ROOT / "LICENSE").read_text(encoding="utf-8"))
    return front | {
        "licence.md": f"# Licence\n\n```text\n{licence}```\n",
        "reference/commands.md": commands(),
        "reference/runspec.md": runspec(),
    }


def commands() -> str:
    """What `--help` prints of every command."""
    parts = ["# Commands", "What `--help` prints, of every command. `node` is an alias of `atoll`.", ""]
    for name in COMMANDS:
        for words, command in _with_verbs(name, cli.get_command(click.Context(cli), name)):
            context = click.Context(command, info_name=f"atoll {words}", max_content_width=88, terminal_width=88)
            parts += [f"## atoll {words}", "", "```text", command.get_help(context), "```", ""]
    return "\n".join(parts)


def _with_verbs(name: str, command: click.Command | None) -> Iterator[tuple[str, click.Command]]:
    assert command is not None, name
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            yield from _with_verbs(f"{name} {verb}", command.get_command(context, verb))


def runspec() -> str:
    """Every key of a RunSpec: its type, default and meaning, from the source."""
    parts = [
        "# RunSpec",
        "What all members of a run agree on: hashed, and signed by the run's owner. `run new --set KEY=VALUE`",
        "changes a key of the preset, for example `--set outer.rounds=20`.",
        "[The wire](../wires/run.md) has the bytes.",
    ]
    for spec in SPECS:
        first = inspect.getdoc(spec)
        rows = [f"| `{key}` | `{kind}` | {default} | {meaning} |" for key, kind, default, meaning in _fields(spec)]
        table = ["| key | type | default | meaning |", "|---|---|---|---|", *rows]
        parts += ["", f"## {spec.__name__}", "", first or "", "", *table]
    return "\n".join(parts) + "\n"


def _fields(spec: type[msgspec.Struct]) -> Iterator[tuple[str, str, str, str]]:
    tree = ast.parse(dedent(inspect.getsource(spec))).body[0]
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(line, ast.AnnAssign):
            continue
        said = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        kind = ast.unparse(line.annotation).replace("|", "\\|").replace("msgspec.", "")
        default = "" if line.value is None else f"`{ast.unparse(line.value).removeprefix('msgspec.')}`"
        yield ast.unparse(line.target), kind, default, " ".join(str(said).split()).replace("|", "\\|")


def linked(text: str, place: str) -> str:
    """The page with the links of the repository turned into those of the site.

    `place`: where the site has the page. Raises ValueError for a link to what the site does not have.
    """
    source = {there: name for name, there in FRONT.items()}.get(place, f"docs/{place}")

    def turned(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        if ":" in target:
            return found[0]
        there = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        wanted = FRONT.get(there) or ("licence.md" if there == "LICENSE" else there.removeprefix("docs/"))
        if there not in FRONT and there != "LICENSE" and not there.startswith("docs/"):
            raise ValueError(f"{place}: the site has no {there}")
        return before + posixpath.relpath(wanted, posixpath.dirname(place) or ".") + after

    return LINK.sub(turned, text)
