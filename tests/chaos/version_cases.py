"""F19: a node of another version beside a swarm disturbs nobody, says why, and trains once it is upgraded.

It speaks a newer version of the wire on which all peers meet, and no older one (`probe/sitecustomize.py`).
"""

import json
from pathlib import Path

from atoll.cli.sim.swarm import Swarm, start
from atoll.protocols.wires import CALLS
from atoll_bench.goodput.storm import finals_of, newest_final, town, wait_for_all
from tests.chaos.disk_cases import RUN, contributors, environment
from tests.chaos.kill_cases import judged
from tests.chaos.report import Result
from tests.waiting import HANGS_S, poll

OTHER = 2
ROUNDS, FULL_ROUNDS = 5, 100
"""Further final rounds of the others beside it."""
WORDS = "another version of atoll"


def versions(folder: Path, seed: int, full: bool) -> Result:
    """A third node of a newer version joins, and says what is wrong; then it is one of the same."""
    with town(2, seed, folder, changes=RUN) as swarm:
        wait_for_all(swarm, 1)
        with environment({"CHAOS_WIRES": json.dumps({"CALLS": CALLS.newest + 1})}):
            start(swarm, OTHER)
        poll("it says why", lambda: WORDS in why(swarm), HANGS_S)
        last = newest_final(swarm) + (FULL_ROUNDS if full else ROUNDS)
        poll("the others go on", lambda: min(rest(swarm).values()) > last, HANGS_S)
        said, broken = why(swarm), []
        if WORDS not in said:
            broken.append(f"a node of another version says: {said}")
        if finals_of(swarm)[OTHER] >= 0:
            broken.append("a node of another version knows a final round")
        swarm.nodes[OTHER].kill()
        start(swarm, OTHER)
        peer = swarm.nodes[OTHER].peer
        poll("it contributes", lambda: any(peer in each for each in contributors(swarm)), HANGS_S)
        wait_for_all(swarm, newest_final(swarm))
    result = judged("versions", seed, folder, f"it said: {said}")
    result.broken += broken
    return result


def why(swarm: Swarm) -> str:
    """What the node of another version says that it waits for."""
    status = swarm.nodes[OTHER].status()
    if status is not None:
        swarm.nodes[OTHER].peer = status["peer"]
    return status["reason"] if status else ""


def rest(swarm: Swarm) -> dict[int, int]:
    """The newest final round of the others."""
    return {number: final for number, final in finals_of(swarm).items() if number != OTHER}
