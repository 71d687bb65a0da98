"""The command table: name -> where it lives and its one line. Nothing is imported to print it.

Daily commands are one word; the others are a verb after a noun, `atoll peer list`, and are listed by the noun.
A place without a colon is a group of entry points: the repository adds such a command, the plain install has
none.

What a clone of the repository adds is found by entry point.
"""

from atoll.protocols.errors import ConfigError

COMMANDS = {
    "start": ("atoll.cli.commands.start:start", "Join a run and train until stopped."),
    "stop": ("atoll.cli.commands.steer:stop", "Stop the node in good order."),
    "pause": ("atoll.cli.commands.steer:pause", "Finish the round at hand and start no other."),
    "resume": ("atoll.cli.commands.steer:resume", "Go on after a pause."),
    "limit": ("atoll.cli.commands.steer:limit", "Limit the running node's traffic."),
    "status": ("atoll.cli.commands.status:status", "What the node does now, and why."),
    "top": ("atoll.cli.top.command:top", "A full screen of the running node, with keys."),
    "logs": ("atoll.cli.commands.logs:logs", "The node's log."),
    "chat": ("atoll.cli.commands.generate:chat", "Talk with a run's weights."),
    "invite": ("atoll.cli.commands.invite:invite", "Invite others to a run; list and revoke invites."),
    "doctor": ("atoll.cli.commands.doctor:doctor", "Check machine, network and node; say what to do."),
    "config": ("atoll.cli.node_commands.config:config", "This node's settings: list, get, set."),
    "run": ("atoll.cli.runs.group:run", "Make, list, show and find runs."),
    "node": ("atoll.cli.commands.nouns:node", "The node of this home: its identity, page, service."),
    "peer": ("atoll.cli.commands.nouns:peer", "Other nodes: list them, exclude one."),
    "data": ("atoll.cli.data.command:data", "Pack texts into shards that members fetch from each other."),
    "checkpoint": (
        "atoll.cli.commands.checkpoint:checkpoint",
        "A run's whole state in files, to go on from.",
    ),
    "model": ("atoll.cli.commands.nouns:model", "A run's weights: write, talk, serve, measure, export."),
    "completion": (
        "atoll.cli.node_commands.completion:completion",
        "A script that completes commands in a shell.",
    ),
    "bench": ("atoll.commands", "The published figures, measured again here."),
    "sim": ("atoll.cli.sim.command:sim", "A swarm of real processes on this machine."),
    "rounds": ("atoll.cli.commands.status:rounds", "What happened in each round."),
    "peers": ("atoll.cli.commands.status:peers", "Whom the node knows, and over which path."),
    "web": ("atoll.cli.page.web:web", "Open the page of the running node."),
    "eval": ("atoll.cli.commands.steer:evaluate", "Validation loss of the weights as they are now."),
    "generate": ("atoll.cli.commands.generate:generate", "Go on with a text, by a run's weights."),
    "serve": ("atoll.cli.commands.serve:serve", "Serve a run's weights by OpenAI's API, on this machine."),
    "export": ("atoll.cli.commands.export:export", "Write the weights of a run for other programs."),
    "id": ("atoll.cli.commands.identity:identity", "The node's identity."),
    "service": ("atoll.cli.node_commands.service:service", "The node as a service: systemd, launchd."),
    "kernels": ("atoll.cli.node_commands.kernels:kernels", "Compile kernels now, not at the first start."),
    "bundle": ("atoll.cli.node_commands.bundle:bundle", "One file for a bug report, without secrets."),
}
"""Commands without a noun, in the order of `--help`."""
NOUNS = {
    "node": {
        **{name: name for name in ("start", "stop", "pause", "resume", "limit", "status", "top", "logs")},
        **{name: name for name in ("web", "id", "config", "service", "kernels", "bundle", "doctor")},
    },
    "peer": {"list": "peers", "exclude": "run exclude"},
    "model": {name: name for name in ("generate", "chat", "serve", "eval", "export")},
}
"""Nouns whose verbs are commands that live elsewhere: verb -> its name in COMMANDS, or below a noun."""
MOVED = {
    "rounds": "run rounds",
    "peers": "peer list",
    "web": "node web",
    "eval": "model eval",
    "generate": "model generate",
    "serve": "model serve",
    "export": "model export",
    "id": "node id",
    "service": "node service",
    "kernels": "node kernels",
    "bundle": "node bundle",
}
"""Older spellings, which work and are not shown -> what they are now."""
SHOWN = [name for name in COMMANDS if name not in MOVED]
SECTIONS = {
    "Every day": SHOWN[: SHOWN.index("run")],
    "By subject": SHOWN[SHOWN.index("run") : SHOWN.index("completion")],
    "More": SHOWN[SHOWN.index("completion") :],
}


def extension(group: str, name: str, what: str) -> str:
    """The `module:attribute` of an entry point. Raises ConfigError, which calls it `what`, where there is none."""
    from importlib.metadata import entry_points

    found = next(iter(entry_points(group=group, name=name)), None)
    if found is None:
        raise ConfigError(
            f"{what}: not part of the plain install", hint="`git clone` the repository; `make setup`"
        )
    return found.value
