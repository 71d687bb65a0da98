"""`status`, `peers`, `rounds`: what the node says about itself."""

import sys
from collections.abc import Iterator

import click

from atoll.cli.client import call, stream
from atoll.cli.formatting import (
    agreed_line,
    called,
    gives,
    goodput_line,
    members_line,
    number,
    place_in_run,
    print_json,
    print_table,
    progress_parts,
    room_text,
    sent_line,
    size,
    span,
    steps_share,
    trains,
    validation_line,
)
from atoll.cli.options import home_option, json_option
from atoll.node.config.home import Home, is_locked
from atoll.protocols.errors import NotRunning, counted
from atoll.protocols.ids import short
from atoll.protocols.local import control_messages
from atoll.protocols.local.privacy_now import PrivacyNow
from atoll.protocols.local.progress import RateNow
from atoll.protocols.local.standing import LedgerUse, Standing

UNHEALTHY = 4
_PEERS = "peer,name,path,rtt,activity,round,final,tokens/s,heard,faults,counts,address"
_ROUNDS = "round,digest,final,by,loss,val bpb,payload,up,down,train,wait,ahead,goodput"
PEER_HEAD, ROUND_HEAD = _PEERS.split(","), _ROUNDS.split(",")


@click.command()
@home_option
@json_option
@click.option("-w", "--watch", is_flag=True, help="Each second anew, until interrupted.")
@click.option("--exit-code", is_flag=True, help=f"Exit {UNHEALTHY} when the node needs help (health checks).")
@click.option("--last", is_flag=True, help="How far the node came, from its disk; it need not run.")
def status(home: Home, as_json: bool, watch: bool, exit_code: bool, last: bool) -> int:
    """What the node does now, and why."""
    if last:
        # Here, since what reads runs takes longer to import than `status` takes to answer.
        from atoll.cli.stopped_node import last_lines, last_status

        found = last_status(home)
        print_json(found) if as_json else click.echo("\n".join(last_lines(found, runs=is_locked(home))))
        return 0
    show = _redrawn if watch and not as_json and sys.stdout.isatty() else _printed
    try:
        if watch:
            seen = stream(home, control_messages.Watch(), control_messages.Status)
        else:
            seen = iter([call(home, control_messages.GetStatus(), control_messages.Status)])
        now = show(seen, as_json=as_json, short_lines=watch)
    except NotRunning as fault:
        from atoll.cli.node_commands.last_end import last_end

        said = "; ".join(filter(None, (str(fault), last_end(home))))
        raise NotRunning(said, hint=fault.hint) from fault
    return UNHEALTHY if exit_code and now is not None and now.trouble else 0


def _printed(
    statuses: Iterator[control_messages.Status], *, as_json: bool, short_lines: bool
) -> control_messages.Status | None:
    now = None
    for now in statuses:
        if as_json:
            print_json(now)
        elif short_lines:
            click.echo(one_line(now))
        else:
            click.echo("\n".join(facts(now)))
    return now


def _redrawn(statuses: Iterator[control_messages.Status], **_: bool) -> control_messages.Status | None:
    """Each status over the one before, on a terminal; the last one stays there."""
    from rich.live import Live
    from rich.text import Text

    now = None
    with Live(auto_refresh=False) as live:
        for now in statuses:
            live.update(Text("\n".join(facts(now))), refresh=True)
    return now


@click.command()
@home_option
@json_option
def peers(home: Home, as_json: bool) -> None:
    """Whom the node knows, and over which path."""
    answer = call(home, control_messages.GetPeers(), control_messages.PeerList)
    if as_json:
        print_json(answer)
        return
    print_table(PEER_HEAD, map(peer_cells, answer.peers))


@click.command()
@home_option
@json_option
@click.option(
    "-n", "--last", default=20, type=click.IntRange(1, control_messages.MAX_ROUNDS), help="Newest rounds to show."
)
def rounds(home: Home, as_json: bool, last: int) -> None:
    """What happened in each round; of a node that does not run, from its disk."""
    try:
        answer = call(home, control_messages.GetRounds(last), control_messages.RoundList)
    except NotRunning:
        from atoll.cli.stopped_node import last_rows, last_run

        rows = last_rows(home, last_run(home))
        answer = control_messages.RoundList(tuple(rows[-last:]))
    if as_json:
        print_json(answer)
        return
    print_table(ROUND_HEAD, map(round_cells, answer.rounds))


def one_line(now: control_messages.Status) -> str:
    """A status for logs and narrow screens."""
    parts = [place_in_run(now), now.activity]
    if now.activity == "training" and now.steps:
        parts.append(f"step {now.step}/{now.steps}")
    if now.reason:
        parts.append(now.reason)
    parts += progress_parts(now)
    parts += [f"loss {number(now.train_loss)}"] if trains(now) else []
    parts += [f"val {number(now.val_bpb)} bpb", counted(now.members, "member")]
    parts.append(
        f"goodput {steps_share(now.goodput.window if now.goodput else None)}" if trains(now) else gives(now)
    )
    parts += [f"final {now.final}" if now.final >= 0 else "none final"]
    parts += [f"up {size(now.bytes_up)}", f"down {size(now.bytes_down)}"]
    parts += [now.unsettled] if now.unsettled else []
    return " | ".join(parts + ([f"! {now.trouble}"] if now.trouble else []))


def rate_line(now: RateNow) -> str:
    """The learning rate and the part of its schedule: `0.002, stable until step 400 (now 31)`."""
    until = "" if now.until is None else f" until step {now.until}"
    return f"{now.rate:.3g}, {now.phase}{until} (now {now.step})"


def privacy_line(now: PrivacyNow) -> str:
    """What contributions say of one sequence: `ε 4.38 of this node alone at δ 1e-05 for each sequence, …`."""
    ends = (
        "" if now.most is None else f"; no round beyond {now.most:g}" + (", so none any more" if now.spent else "")
    )
    used = f"used in {counted(now.uses, 'step')} at most"
    return f"ε {now.epsilon:.3g} of this node alone at δ {now.delta:g} for each sequence, {used}{ends}"


def facts(now: control_messages.Status) -> Iterator[str]:
    """A status for a screen, one fact a line."""
    doing = now.activity + (f" – {now.reason}" if now.reason else "")
    if now.activity == "training" and now.steps:
        doing += f", step {now.step}/{now.steps}"
    doing = ", ".join([doing, *progress_parts(now)])
    if now.trouble:
        yield f"trouble   {now.trouble}"
    yield f"node      {now.name or short(now.peer)}  {now.peer}  (pid {now.pid}, up {span(now.uptime_s)})"
    yield f"run       {now.run_name}  {now.run[:16]}"
    yield f"now       {place_in_run(now)}: {doing}"
    yield f"roles     {', '.join(now.roles)}; {gives(now)}"
    yield f"model     loss {number(now.train_loss)}, validation {validation_line(now)}"
    yield f"agreed    {agreed_line(now.final, now.digest, now.contributors)}"
    if now.unsettled:
        yield f"          {now.unsettled}"
    if now.experts is not None:
        yield f"experts   {', '.join(map(str, now.experts)) or 'none'}"
    if now.room is not None:
        yield f"          {room_text(now.room)}"
    if trains(now):
        yield f"speed     {number(now.tokens_per_s, 0)} tokens/s on {now.device}"
        yield f"          trained {span(now.train_s)}, waited {span(now.wait_s)} in the newest round"
        if now.learning_rate is not None:
            yield f"rate      {rate_line(now.learning_rate)}"
        if now.overlap_allowed:
            yield f"overlap   {overlap(now)}"
        yield f"goodput   {goodput_line(now.goodput)}"
    if now.privacy is not None:
        yield f"privacy   {privacy_line(now.privacy)}"
    yield f"swarm     {members_line(now)}"
    if now.ledger is not None:
        yield f"ledger    {ledger(now.ledger)}"
    for one in now.excluded:
        by = "" if one.by == "owner" else " by two thirds of the voters"
        yield f"excluded  {one.peer} from round {one.round} on{by}" + (f": {one.reason}" if one.reason else "")
        if one.excised_in is not None:
            yield f"          its work since round {one.excise_since} was taken out in round {one.excised_in}"
        elif one.excise_since is not None:
            yield f"          its work since round {one.excise_since} is to be taken out"
    for vote in now.votes_against:
        ours = ", this node among them" if vote.by_us else ""
        yield f"votes     {vote.votes} of {vote.needed} to exclude {vote.peer}{ours}"
    if now.standing is not None and now.standing.why:
        yield f"counts    {now.standing.why}"
    for each in now.diminished:
        yield f"member    {called(each.peer, now.names.get(each.peer, ''))}: {each.why}"
    yield f"traffic   up {size(now.bytes_up)}, down {size(now.bytes_down)}, payload {size(now.payload_bytes)}"
    yield f"sent      {sent_line(now.sent)}"
    if now.limits is not None:
        yield f"limits    {limits(now.limits)}"
    yield f"reach     {now.reachability}" + (f": {now.reachability_why}" if now.reachability_why else "")
    if now.relay is not None:
        yield f"relay     {relaying(now.relay)}"
    if now.web or now.web_trouble:
        yield f"web       {now.web or now.web_trouble}"
    for name, state in now.loggers.items():
        yield f"logger    {name}: {state}"
    for maddr in now.addresses:
        yield f"address   {maddr}/p2p/{now.peer}"


def overlap(now: control_messages.Status) -> str:
    """How far the node runs ahead of the fold of the round before."""
    may = f"up to {now.overlap_allowed} steps before a fold is in"
    if now.overlapped is None:
        return may
    return f"{may}; {now.overlapped} in the newest round, then held {span(now.held_s)}"


def limits(use: control_messages.LimitUse) -> str:
    """Caps that hold now, and the month."""
    rates = [
        f"{name} {size(rate)}/s" for name, rate in (("up", use.up_bytes_s), ("down", use.down_bytes_s)) if rate
    ]
    used = size(use.month_up_bytes + use.month_down_bytes)
    month = f"{used} of {size(use.month_quota_bytes)}" if use.month_quota_bytes else used
    text = f"{', '.join(rates) or 'none'}; this month {month}, the next begins {use.month_ends}"
    return f"{text}; {use.stopped}" if use.stopped else text


def ledger(use: LedgerUse) -> str:
    """Who is in the ledger, how many without work had to go, and which rounds it has records of."""
    new = f"{use.new} new of {use.places} places" + (f", {use.pruned} gave theirs up" if use.pruned else "")
    kept = f"; records from round {use.records_from} on" if use.records_from else ""
    return f"{counted(use.accepted, 'author')}, {use.worked} more that worked, {new}; {size(use.disk_bytes)}{kept}"


def counts(standing: Standing | None) -> str:
    """What a member counts for, in a table's cell; `atoll status` has the reasons."""
    if standing is None:
        return "–"
    until = standing.distrusted_until
    told = (
        f"votes in {standing.votes_in}" if standing.votes_in else "",
        f"weight {standing.weight_16}/16" if standing.weight_16 < 16 else "",
        f"no reducer up to {until}" if until is not None else "",
    )
    return ", ".join(filter(None, told)) or "in full"


def relaying(use: control_messages.RelayUse) -> str:
    """What the node relays for others."""
    today = f"{size(use.bytes_today)} of {size(use.bytes_per_day)} today"
    return f"{counted(use.circuits, 'circuit')} open, {use.circuits_served} served, {today}, {use.refused} refused"


def peer_cells(row: control_messages.PeerStatus) -> tuple[str, ...]:
    """A peer as a row below PEER_HEAD."""
    return (
        short(row.peer),
        row.name or "–",
        row.path or "–",
        span(row.rtt_s),
        _activity(row),
        "–" if row.round is None else str(row.round),
        "–" if row.final is None or row.final < 0 else str(row.final),
        number(row.tokens_per_s or None, 0),
        span(row.heard_s),
        str(row.faults),
        counts(row.standing),
        row.maddr,
    )


def _activity(row: control_messages.PeerStatus) -> str:
    if row.excluded_from is not None:
        return f"excluded from {row.excluded_from}"
    votes = f"{row.votes_against} to exclude" if row.votes_against else ""
    return ", ".join(filter(None, (row.activity, votes))) or "–"


def round_cells(row: control_messages.RoundStatus) -> tuple[str, ...]:
    """A round as a row below ROUND_HEAD."""
    return (
        str(row.round),
        row.digest[:12] or "–",
        "yes" if row.final else "open",
        str(len(row.contributors)),
        number(row.train_loss),
        number(row.val_bpb),
        size(row.payload_bytes),
        size(row.bytes_up),
        size(row.bytes_down),
        span(row.train_s),
        span(row.wait_s + row.transfer_s),
        f"{row.overlapped} of {row.overlap_allowed}" if row.overlap_allowed else "–",
        steps_share(row),
    )
