"""`pause`, `resume`, `limit`, `stop`, `eval`: what the operator tells the node to do."""

import click
import msgspec

from atoll.cli.client import call
from atoll.cli.durations import Duration
from atoll.cli.formatting import print_json
from atoll.cli.model_source import open_model, printable
from atoll.cli.node_commands.ending import STOPS_S, tell, wait_for_end
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home, is_locked
from atoll.node.generation.options import TextOptions
from atoll.protocols.errors import NotRunning
from atoll.protocols.local import control_messages


@click.command()
@click.argument("length", metavar="[2h]", type=Duration(), required=False)
@home_option
@json_option
@click.option("--reason", default="by the operator", help="Shown in status.")
def pause(length: int | None, home: Home, as_json: bool, reason: str) -> None:
    """Finish the round at hand and start no other; rounds of others are still folded.

    For a length of time (30m, 2h, 1d), or until `atoll resume` or the next start.
    """
    request = control_messages.PauseNode(reason, None if length is None else float(length))
    _done(call(home, request, control_messages.CommandDone), as_json)


@click.command()
@home_option
@json_option
def resume(home: Home, as_json: bool) -> None:
    """Go on after a pause, at the round where the others are."""
    _done(call(home, control_messages.ResumeNode(), control_messages.CommandDone), as_json)


@click.command()
@home_option
@json_option
@click.option("--up", metavar="RATE", help="Of all that the node sends: 20mbit, 2.5MB/s, none, or off.")
@click.option("--down", metavar="RATE", help="Of all that it receives.")
@click.option("--reset", is_flag=True, help="As configured again.")
def limit(home: Home, as_json: bool, up: str | None, down: str | None, reset: bool) -> None:
    """Limit the running node's traffic, until it ends; `config set limits.up RATE` does so for good.

    A direction without a rate is as configured. `off`: no large transfers.
    """
    if reset == (up is not None or down is not None):
        raise click.UsageError("give --up or --down with a rate, or --reset")
    request = control_messages.SetLimits(_rate(up), _rate(down))
    _done(call(home, request, control_messages.CommandDone), as_json)


@click.command()
@home_option
@json_option
@click.option("--finish", is_flag=True, help="Only after the round at hand is announced.")
@click.option(
    "--wait", is_flag=True, help="Return when the node has ended; exit 5 where it has not within --within."
)
@click.option("--within", type=Duration(), default=STOPS_S, show_default="5m", help="For --wait, for example 2h.")
def stop(home: Home, as_json: bool, finish: bool, wait: bool, within: int) -> None:
    """Stop the node in good order. No node is no error."""
    if wait and is_locked(home):
        from atoll.cli.node_commands.last_end import check_end, started_at

        since = started_at(home)
        wait_for_end(home, finish=finish, within_s=within)
        check_end(home, since)
        _done(control_messages.CommandDone("the node ended"), as_json)
        return
    try:
        answer = tell(home, finish=finish)
    except NotRunning:
        answer = control_messages.CommandDone("no node runs here")
    _done(answer, as_json)


@click.command("eval")
@home_option
@json_option
@click.option("--sample", is_flag=True, help="Also print a text by the newest final weights.")
def evaluate(home: Home, as_json: bool, sample: bool) -> None:
    """Validation loss of the weights as they are now; of a node that does not run, of those that it saved."""
    try:
        answer = call(home, control_messages.EvaluateModel(), control_messages.EvaluationResult)
    except NotRunning:
        # Here, since no other command of these reads a run.
        from atoll.cli.stopped_node import last_evaluation

        answer = last_evaluation(home)
    if not as_json:
        click.echo(
            f"{answer.val_bpb:.4f} bits per byte ({answer.val_loss:.4f} nats per token) after round {answer.round}"
        )
    text = {"sample": _sample(home)} if sample else {}
    if as_json:
        print_json(msgspec.to_builtins(answer) | text)
    elif sample:
        click.echo(text["sample"])


def _sample(home: Home) -> str:
    """A text from nothing by the weights of the run that the node trains, or trained last."""
    from atoll.cli.stopped_node import last_run

    model = open_model(home, last_run(home).spec.id.hex())
    return printable(model.generate(model.tokens_of(""), TextOptions()).text)


def _rate(text: str | None) -> str | None:
    return "" if text == "none" else text


def _done(answer: control_messages.CommandDone, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        click.echo(answer.message)
