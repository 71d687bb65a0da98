"""The command table: name -> where it lives and its one line. Nothing is imported to print it."""

COMMANDS = {
    "run": ("atoll.cli.run:run", "Make, list and show runs."),
    "start": ("atoll.cli.start:start", "Join a run and train until stopped."),
    "invite": ("atoll.cli.invite:invite", "A link that lets others join a run."),
    "status": ("atoll.cli.status:status", "What the node does now, and why."),
    "peers": ("atoll.cli.status:peers", "Whom the node knows, and over which path."),
    "rounds": ("atoll.cli.status:rounds", "What happened in each round."),
    "logs": ("atoll.cli.logs:logs", "The node's log."),
    "pause": ("atoll.cli.orders:pause", "Finish the round at hand and start no other."),
    "resume": ("atoll.cli.orders:resume", "Go on after a pause."),
    "stop": ("atoll.cli.orders:stop", "Stop the node in good order."),
    "eval": ("atoll.cli.orders:evaluate", "Validation loss of the weights as they are now."),
    "export": ("atoll.cli.export:export", "Write the weights of a run for other programs."),
    "checkpoint": (
        "atoll.cli.checkpoint:checkpoint",
        "A run's whole state in files, to go on from.",
    ),
    "id": ("atoll.cli.identity:identity", "The node's identity."),
    "doctor": ("atoll.cli.doctor:doctor", "Check machine, network and node; say what to do."),
    "bench": ("atoll.cli.bench:bench", "The published figures, measured again here."),
    "sim": ("atoll.cli.sim:sim", "A swarm of real processes on this machine."),
}
