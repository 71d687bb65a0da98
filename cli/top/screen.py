"""The application behind `atoll top`: asks the node in a thread, and draws what it said."""

from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, Log, Sparkline, Static, TabbedContent, TabPane

from atoll.cli.client import call
from atoll.cli.commands.status import PEER_HEAD, ROUND_HEAD, facts, peer_cells, round_cells
from atoll.cli.formatting import called, place_in_run
from atoll.cli.model_source import printable
from atoll.cli.top.reading import Chart, Reading, loss_chart, read_node, speed_chart
from atoll.node.config.home import Home
from atoll.protocols.errors import AtollError
from atoll.protocols.local import control_messages

PAGES = ("now", "peers", "rounds", "log")


class NodeScreen(App[None]):
    """Pages of one node. Leaving it changes nothing: the node runs on."""

    CSS = """
    #head { height: auto; padding: 0 1; text-style: bold; }
    #alarm { height: auto; padding: 0 1; color: $error; }
    .label { height: 1; padding: 0 1; color: $text-muted; }
    Sparkline { height: 3; margin: 0 1; }
    #facts { padding: 0 1; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p", "pause", "Pause"),
        Binding("r", "resume", "Resume"),
        Binding("tab", "next_page", "Next page", priority=True),
        Binding("q", "quit", "Quit"),
    ]

    def __init__(
        self, home: Home, first: Reading, *, every_s: float = 1.0, read: Callable[[Home], Reading] = read_node
    ) -> None:
        super().__init__()
        self._home = home
        self._reading = first
        self._every_s = every_s
        self._read = read

    def compose(self) -> ComposeResult:
        """The widgets, from top to bottom."""
        yield Static(id="head", markup=False)
        yield Static(id="alarm", markup=False)
        for name in ("loss", "speed"):
            yield Static(id=f"{name}-label", classes="label", markup=False)
            yield Sparkline(id=name)
        with TabbedContent(*map(str.capitalize, PAGES)):
            with TabPane("Now", id="now"):
                yield Static(id="facts", markup=False)
            with TabPane("Peers", id="peers"):
                yield DataTable[Text](id="peer-table", cursor_type="none")
            with TabPane("Rounds", id="rounds"):
                yield DataTable[Text](id="round-table", cursor_type="none")
            with TabPane("Log", id="log"):
                yield Log(id="log-lines")
        yield Footer()

    def on_mount(self) -> None:
        """Draw the first reading, and ask for the next ones."""
        self.query_one("#peer-table", DataTable).add_columns(*PEER_HEAD)
        self.query_one("#round-table", DataTable).add_columns(*ROUND_HEAD)
        self.draw(self._reading)
        self.set_interval(self._every_s, self.refresh_node)

    def refresh_node(self) -> None:
        """Ask the node, in a thread: it may take seconds to answer. A question under way is not asked twice."""
        if not any(worker.group == "read" and not worker.is_finished for worker in self.workers):
            self.run_worker(self._ask, thread=True, group="read")

    def action_pause(self) -> None:
        """Pause the node until it is resumed."""
        self._order(control_messages.PauseNode())

    def action_resume(self) -> None:
        """Resume the node."""
        self._order(control_messages.ResumeNode())

    def action_next_page(self) -> None:
        """Show the page to the right, the first one after the last."""
        tabs = self.query_one(TabbedContent)
        tabs.active = PAGES[(PAGES.index(tabs.active) + 1) % len(PAGES)]

    def draw(self, reading: Reading) -> None:
        """Show a reading on all pages."""
        if not self.query("#head"):  # an answer that came while the screen closes
            return
        now = reading.status
        title = f"atoll {called(now.peer, now.name)} · {now.run_name} · {place_in_run(now)} · {now.activity}"
        self.query_one("#head", Static).update(printable(title))
        self._alarm(now.trouble)
        self._draw_chart("loss", loss_chart(reading.rounds))
        self._draw_chart("speed", speed_chart(reading.rounds))
        self.query_one("#facts", Static).update(printable("\n".join(facts(now))))
        _fill(self.query_one("#peer-table", DataTable), [peer_cells(row) for row in reading.peers])
        _fill(self.query_one("#round-table", DataTable), [round_cells(row) for row in reversed(reading.rounds)])
        if reading.log != self._reading.log or not self.query_one("#log-lines", Log).line_count:
            self._draw_log(reading.log)
        self._reading = reading

    def _draw_chart(self, name: str, chart: Chart) -> None:
        self.query_one(f"#{name}-label", Static).update(chart.label)
        self.query_one(f"#{name}", Sparkline).data = chart.values or None

    def _draw_log(self, lines: tuple[control_messages.LogLine, ...]) -> None:
        shown = self.query_one("#log-lines", Log)
        shown.clear()
        shown.write_lines(printable(f"{line.time[11:19]} {line.level:7} {line.message}") for line in lines)

    def _alarm(self, text: str) -> None:
        for place in self.query("#alarm").results(Static):
            place.update(printable(text))

    def _ask(self) -> None:
        try:
            reading = self._read(self._home)
        except AtollError as error:
            self.call_from_thread(self._alarm, error.line())
            return
        self.call_from_thread(self.draw, reading)

    def _order(self, request: control_messages.Ask) -> None:
        def send() -> None:
            try:
                answer = call(self._home, request, control_messages.CommandDone).message
            except AtollError as error:
                answer = error.line()
            self.call_from_thread(self.notify, printable(answer), markup=False)
            self.call_from_thread(self.refresh_node)

        self.run_worker(send, thread=True, group="order")


def _fill(table: DataTable[Text], rows: list[tuple[str, ...]]) -> None:
    table.clear()
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
