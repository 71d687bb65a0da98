"""The command table: name -> where it lives and its one line. Nothing is imported to print it.

A place without a colon is a group of entry points: the repository adds such a command, the plain install has
none.

What a clone of the repository adds is found by entry point.
"""

from atoll.protocols.errors import ConfigError

COMMANDS = {
    "run": ("atoll.cli.runs.group:run", "Make, list, show and find runs."),
    "data": ("atoll.cli.data.command:data", "Pack texts into shards that members fetch from each other."),
    "start": ("atoll.cli.commands.start:start", "Join a run and train until stopped."),
    "invite": ("atoll.cli.commands.invite:invite", "A link that lets others join a run."),
    "status": ("atoll.cli.commands.status:status", "What the node does now, and why."),
    "peers": ("atoll.cli.commands.status:peers", "Whom the node knows, and over which path."),
    "rounds": ("atoll.cli.commands.status:rounds", "What happened in each round."),
    "top": ("atoll.cli.top.command:top", "A full screen of the running node, with keys."),
    "web": ("atoll.cli.page.web:web", "Open the page of the running node."),
    "logs": ("atoll.cli.commands.logs:logs", "The node's log."),
    "pause": ("atoll.cli.commands.steer:pause", "Finish the round at hand and start no other."),
    "resume": ("atoll.cli.commands.steer:resume", "Go on after a pause."),
    "stop": ("atoll.cli.commands.steer:stop", "Stop the node in good order."),
    "eval": ("atoll.cli.commands.steer:evaluate", "Validation loss of the weights as they are now."),
    "generate": ("atoll.cli.commands.generate:generate", "Go on with a text, by a run's weights."),
    "chat": ("atoll.cli.commands.generate:chat", "Talk with a run's weights."),
    "serve": ("atoll.cli.commands.serve:serve", "Serve a run's weights by OpenAI's API, on this machine."),
    "export": ("atoll.cli.commands.export:export", "Write the weights of a run for other programs."),
    "checkpoint": (
        "atoll.cli.commands.checkpoint:checkpoint",
        "A run's whole state in files, to go on from.",
    ),
    "id": ("atoll.cli.commands.identity:identity", "The node's identity."),
    "config": ("atoll.cli.node_commands.config:config", "This node's settings: list, get, set."),
    "service": ("atoll.cli.node_commands.service:service", "The node as a service: systemd, launchd."),
    "bundle": ("atoll.cli.node_commands.bundle:bundle", "One file for a bug report, without secrets."),
    "completion": (
        "atoll.cli.node_commands.completion:completion",
        "A script that completes commands in a shell.",
    ),
    "doctor": ("atoll.cli.commands.doctor:doctor", "Check machine, network and node; say what to do."),
    "bench": ("atoll.commands", "The published figures, measured again here."),
    "sim": ("atoll.cli.sim.command:sim", "A swarm of real processes on this machine."),
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
