"""F14, out of memory: the kernel ends the worker of a node, because another program takes what there is.

In full the node then gets too little memory to train at all: it ends with one line that says what to set, and
comes back when there is enough.
"""

from pathlib import Path

from atoll.cli.sim.swarm import Swarm, start
from atoll.node.ipc.worker_process import MORE_MEMORY, OUT_OF_MEMORY
from atoll_bench.goodput.storm import newest_final, town, wait_for_all
from tests.chaos.disk_cases import RUN, VICTIM
from tests.chaos.kill_cases import judged
from tests.chaos.memory_group import MemoryGroup, memory_group
from tests.chaos.report import Result
from tests.waiting import HANGS_S, poll

SPARE = 64 << 20
"""Left to the node above what it uses: a worker that starts needs a little more than one that trains."""
TOO_LITTLE = 160 << 20
"""Enough for a daemon, and for no worker."""
FREE = 4 << 30


def oom(folder: Path, seed: int, full: bool) -> Result:
    """The kernel ends the worker; the node says so in one line, and goes on."""
    with memory_group("oom") as group, town(2, seed, folder, changes=RUN) as swarm:
        wait_for_all(swarm, 1)
        again(swarm, group)
        wait_for_all(swarm, newest_final(swarm))
        before = group.kills
        group.set_limit(group.used + SPARE)
        with group.eaten(2 * SPARE):
            poll("the kernel ends a process", lambda: group.kills > before, HANGS_S)
        took_s = wait_for_all(swarm, newest_final(swarm))
        times = group.kills - before
        words = said(folder)
        broken = [] if f"{OUT_OF_MEMORY}: {MORE_MEMORY}" in words else ["the node did not say it"]
        seen = f"the kernel ended {times} processes, further final rounds on all {took_s:.0f} s later"
        if full:
            broken += starved(swarm, group, folder)
    result = judged("oom", seed, folder, seen)
    result.broken += broken
    return result


def again(swarm: Swarm, group: MemoryGroup) -> None:
    """Start the victim again, in the group."""
    swarm.nodes[VICTIM].kill()
    start(swarm, VICTIM)
    group.add(swarm.nodes[VICTIM].processes()[0].pid)


def starved(swarm: Swarm, group: MemoryGroup, folder: Path) -> list[str]:
    """Start with too little memory for any worker, then with enough; what is wrong."""
    node = swarm.nodes[VICTIM]
    node.kill()
    group.set_limit(TOO_LITTLE)
    start(swarm, VICTIM)
    group.add(node.processes()[0].pid)
    poll("it gives up", lambda: not node.running, HANGS_S)
    words = "\n".join(said(folder).splitlines()[-3:])
    group.set_limit(FREE)
    start(swarm, VICTIM)
    wait_for_all(swarm, newest_final(swarm))
    return [] if OUT_OF_MEMORY in words and MORE_MEMORY in words else [f"with too little memory it said: {words}"]


def said(folder: Path) -> str:
    """All that the victim printed."""
    return (folder / f"node-{VICTIM}" / "out.log").read_text(errors="replace")
