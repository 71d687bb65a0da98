"""The live panel of `start` on a terminal: a status as a frame that is painted anew, and lines above it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll.cli.formatting import (
    agreed_line,
    called,
    gives,
    goodput_line,
    members_line,
    number,
    place_in_run,
    progress_parts,
    size,
    span,
    trains,
    validation_line,
)
from atoll.protocols.local.control_messages import Status

_STYLES = {"training": "green", "done": "green", "finished": "green", "paused": "yellow"}


@contextmanager
def painting() -> Iterator[Callable[[Status, list[str]], None]]:
    """Paint until the block ends; the function is given each status, and lines that stay above the panel."""
    with Live(console=Console(), refresh_per_second=4, transient=False) as live:
        live.update("starting …")

        def paint(now: Status, lines: list[str]) -> None:
            for line in lines:
                live.console.print(line, soft_wrap=True, highlight=False)  # whole, to be copied
            live.update(render(now))

        yield paint


def render(now: Status) -> RenderableType:
    """A status as a panel for the terminal."""
    head = Text.assemble(
        (now.activity, _STYLES.get(now.activity, "cyan")), f"  {now.reason}" if now.reason else ""
    )
    if told := progress_parts(now):
        head.append(f"  {', '.join(told)}", "dim")
    table = Table.grid(padding=(0, 2))
    if now.progress and now.progress.of_bytes:
        what, done, of = "fetched", now.progress.done_bytes or 0, now.progress.of_bytes
    else:
        what, done, of = "step", now.step, now.steps
    table.add_row(Text(what, "dim"), ProgressBar(total=max(1, of), completed=done, width=40))
    for label, text in _rows(now):
        table.add_row(Text(label, "dim"), Text(text))  # a member's name is no markup
    parts: list[RenderableType] = [head, table]
    if now.trouble:
        parts.append(Text(now.trouble, "bold red"))
    title = f"atoll {called(now.peer, now.name)} · {now.run_name} · {place_in_run(now)}"
    return Panel(Group(*parts), title=Text(title), subtitle="Ctrl-C stops in good order")


def _rows(now: Status) -> Iterator[tuple[str, str]]:
    yield "gives", gives(now)
    yield "loss", f"{number(now.train_loss)} nats per token, validation {validation_line(now)}"
    if trains(now):
        yield "speed", f"{number(now.tokens_per_s, 0)} tokens/s on {now.device}"
        yield (
            "last round",
            f"trained {span(now.train_s)}, waited {span(now.wait_s)}, payload {size(now.payload_bytes)}",
        )
        yield "goodput", goodput_line(now.goodput)
    yield "swarm", members_line(now)
    yield "agreed", agreed_line(now.final, now.digest, now.contributors)
    if now.unsettled:
        yield "", now.unsettled
    yield "traffic", f"up {size(now.bytes_up)}, down {size(now.bytes_down)}"
    if now.web or now.web_trouble:
        yield "web", now.web or now.web_trouble
