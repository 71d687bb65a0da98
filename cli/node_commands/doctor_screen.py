"""What `doctor` prints: one screen of checks, or which presets fit this machine."""

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.text import Text

from atoll.cli.doctor_findings import findings
from atoll.cli.formatting import print_json, print_table, size
from atoll.node.config.home import Home
from atoll.node.config.node_config import NodeConfig, load_config
from atoll.node.doctor.checks import Finding, has_no_failure
from atoll.node.runs.capacity.machine_fit import PresetFit, largest, measure_machine, presets_here
from atoll.protocols.errors import counted

_STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_WIDTH = 10


def print_checks(home: Home, wanted: str | None, *, as_json: bool) -> int:
    """Check, and print what was found; the exit code. `wanted`: the run whose needs count."""
    rows = findings(home, wanted)
    if as_json:
        print_json(rows)
    else:
        _print(rows)
    return 0 if has_no_failure(rows) else 1


def print_fit(home: Home, *, as_json: bool) -> int:
    """Print which presets this machine can train; the exit code."""
    return _print_fit(load_config(home.config_toml), as_json)


def lines(rows: Sequence[Finding]) -> list[tuple[str, str]]:
    """(state or nothing, text) of each line on the screen; a remedy has a line of its own."""
    shown: list[tuple[str, str]] = []
    for row in rows:
        shown.append((row.state, f"{row.check.ljust(_WIDTH)} {row.found}"))
        if row.remedy:
            shown.append(("", f"{' ' * _WIDTH} → {row.remedy}"))
    counts = {state: sum(row.state == state for row in rows) for state in _STYLES}
    done = f"{counts['pass']} passed, {counted(counts['warn'], 'warning')}, {counts['fail']} failed"
    shown.append(("", f"{done}, {counts['skip']} not checked"))
    return shown


def _print_fit(config: NodeConfig, as_json: bool) -> int:
    machine = measure_machine(config.device, config.guest.gpu_memory)
    rows = presets_here(config, machine)
    best = largest(rows)
    if as_json:
        print_json({"machine": machine, "presets": rows, "largest": best})
        return 0
    on_gpu = machine.device.startswith("cuda")
    click.echo(f"memory  {_of(machine.memory_free_bytes, machine.memory_bytes)}")
    if on_gpu:
        known = machine.device_bytes is not None
        said = _of(machine.device_free_bytes, machine.device_bytes) if known else "how much it has is unknown here"
        click.echo(f"device  {machine.device}: {said}")
    click.echo()
    head = ("preset", "parameters", "memory", *(("device",) if on_gpu else ()), "a quarter of its slices", "fits")
    print_table(head, map(_fit_row, rows))
    if best:
        click.echo(f"\n{best} is the largest that fits: atoll run new NAME --preset {best}")
    else:
        click.echo("\nno preset fits: take a machine with more memory")
    return 0


def _of(free: int | None, whole: int | None) -> str:
    return f"{size(whole)}, {size(free)} of it free"


def _fit_row(row: PresetFit) -> tuple[str, ...]:
    verdict = "yes" if row.fits_now else "when other programs are closed" if row.fits else "no"
    device = (size(row.device_bytes),) if row.device_bytes else ()
    return row.preset, f"{row.parameters:,}", size(row.memory_bytes), *device, _share(row), verdict


def _share(row: PresetFit) -> str:
    """What a member needs that trains a quarter of the slices of `run new --slices`."""
    if not row.slices:
        return "-"
    device = f" + {size(row.share_device_bytes)}" if row.share_device_bytes else ""
    needed = f"{row.share} of {row.slices} slices: {size(row.share_memory_bytes)}{device}"
    return f"{needed}, {'fits' if row.share_fits else 'too large'}"


def _print(rows: Sequence[Finding]) -> None:
    if not sys.stdout.isatty():
        for state, text in lines(rows):
            click.echo(f"{state.ljust(4)} {text}")
        return
    console = Console(highlight=False, soft_wrap=True)
    for state, text in lines(rows):
        console.print(Text.assemble((state.ljust(4), _STYLES.get(state, "")), " ", (text, "" if state else "dim")))
