"""`invite list` and `invite revoke`: the invites that this home gave out."""

import time

import click

from atoll.cli.formatting import print_json, print_table, span
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home
from atoll.node.runs.given_invites import GivenInvite, given_invites, revoke_given
from atoll.node.runs.run_files import runs_of

SHOWN_ID_CHARACTERS = 8


@click.command("list")
@home_option
@json_option
def list_invites(home: Home, as_json: bool) -> None:
    """List the invites that this home gave out."""
    unix_s, names = time.time(), {run.spec.id: run.spec.name for run in runs_of(home)}
    given = given_invites(home)
    if as_json:
        print_json([about_given(one, unix_s) for one in given])
        return
    if not given:
        click.echo("this home gave out no invite; `atoll invite` makes one")
        return
    rows = []
    for one in given:
        state = _state(one, unix_s)
        left = f"{state} for {span(one.invite.expires - unix_s)}" if state == "valid" else state
        permits = [f"{token.name or 'anybody'}, {token.members or 'any number'}" for token in one.invite.token]
        run = names.get(one.invite.run, one.invite.run.hex()[:SHOWN_ID_CHARACTERS])
        rows.append((one.id[:SHOWN_ID_CHARACTERS], run, _day(one.made), left, "".join(permits) or "-"))
    print_table(("ID", "RUN", "MADE", "STATE", "PERMIT FOR"), rows)


@click.command()
@click.argument("invite_id", metavar="ID")
@home_option
@json_option
def revoke(invite_id: str, home: Home, as_json: bool) -> None:
    """Revoke an invite: its short link leads nowhere from now on."""
    given = revoke_given(home, invite_id)
    if as_json:
        print_json(about_given(given, time.time()))
        return
    click.echo(f"{given.id[:SHOWN_ID_CHARACTERS]} is revoked: this node gives it to nobody any more")
    if given.invite.token:
        until = _day(given.invite.expires)
        click.echo(f"who used it, or has the long link, has its permit: members accept it until {until}", err=True)


def about_given(given: GivenInvite, unix_s: float) -> dict[str, object]:
    """What `--json` shows of an invite that was given out. Its link is left out: it may hold a permit."""
    return {
        "id": given.id,
        "run": given.invite.run.hex(),
        "made": given.made,
        "expires": given.invite.expires,
        "state": _state(given, unix_s),
        "permit": [{"for": token.name, "members": token.members} for token in given.invite.token],
    }


def _state(given: GivenInvite, unix_s: float) -> str:
    if given.is_revoked:
        return "revoked"
    return "valid" if unix_s < given.invite.expires else "expired"


def _day(unix_s: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))
