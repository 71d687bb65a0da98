"""One of two real nodes is killed and comes back, and a third joins late."""

import signal


def kill_and_join(until, owner, second, late, join):
    """Kill `second` and start it again, start `late`; return when all three went on for three final rounds.

    `join`: the arguments with which both find the run.
    """
    second.signal(signal.SIGKILL)
    second.process.wait()
    starting = [node.start(*join) for node in (late, second)]
    for node in starting:
        node.up()
    at = owner.final()
    until("all go on", lambda: min(node.final() for node in (owner, second, late)) >= at + 3)
