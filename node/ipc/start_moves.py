"""Whether a worker's start gets on, by the phases that it names and the CPU time of its processes.

A phase may take minutes (a first compile, a large state on a slow disk), and then only the CPU time moves. A start
that hangs uses none: its process is stopped, or waits for a device or a file system that does not answer.
"""

import psutil

CPU_S = 0.1
"""CPU seconds that are a sign of progress: 0.2 % of a core in a minute, and far more than waiting threads use."""


class StartMoves:
    """Counts signs of progress over all starts of one trainer."""

    def __init__(self) -> None:
        self.count = 0
        """Signs of progress so far; 0: no worker was asked to start yet."""
        self.still_s = 0.0
        """Seconds of this start since the newest sign."""
        self.took_s = 0.0
        """Seconds of this start."""
        self._cpu_s = 0.0

    def begin(self) -> None:
        """A worker is asked to start."""
        self.took_s = self._cpu_s = 0.0
        self.move()

    def move(self) -> None:
        """The worker names a phase of its start."""
        self.count += 1
        self.still_s = 0.0

    def look(self, passed_s: float, cpu_s: float) -> None:
        """The processes of the worker have used `cpu_s` in all, `passed_s` after the look before.

        Time between two looks counts as `passed_s`, however long this process itself did not run.
        """
        self.took_s += passed_s
        self.still_s += passed_s
        # A process that ended takes its seconds along, a compiler's for instance; the others go on from there.
        self._cpu_s = min(self._cpu_s, cpu_s)
        if cpu_s >= self._cpu_s + CPU_S:
            self._cpu_s = cpu_s
            self.move()


def cpu_seconds(pid: int) -> float:
    """CPU seconds of a process and of those that it started; those that cannot be asked count as 0."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0.0
    return sum(map(_own_cpu_seconds, family))


def _own_cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
