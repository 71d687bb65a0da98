"""The delay of links: a process that carries packets between pairs of TUN devices, each after its time.

Stands in for `tc netem`, which many kernels lack. Started by the lab with open devices:
`relay.py '[[fd_a, fd_b, delay_s, jitter_s], ...]'`; a line `[index, delay_s, jitter_s]` on standard input changes
a link, and the end of standard input ends the process. Packets of one direction keep their order: jitter on the
internet comes from queues, and queues do not overtake.
"""

import contextlib
import json
import os
import random
import select
import sys
import time
from collections import deque

EARLY_S = 0.0005
"""epoll rounds up to whole milliseconds; what is due within half of one goes now, so that the mean is right."""
FIRST = -15
"""Niceness: it stands for a cable, and cables do not wait for the processor."""
BATCH = 64
HELD_MAX_BYTES = 64 << 20
"""Per direction. A longer queue belongs to the rate limit before the relay, not here."""
READ_MAX_BYTES = 65535 + 10
"""A bundle of packets and the header that says how to cut it; both ends understand it, the relay need not."""


class Direction:
    """One direction of a link: packets read from `source` are written to `target` after the delay."""

    def __init__(self, source: int, target: int, delay_s: float, jitter_s: float) -> None:
        self.source, self.target = source, target
        self.delay_s, self.jitter_s = delay_s, jitter_s
        self.held: deque[tuple[float, bytes]] = deque()
        self._held_bytes = 0

    def receive(self, now_s: float) -> None:
        """Read waiting packets, at most a batch, so that no direction starves the others."""
        for _ in range(BATCH):
            try:
                packet = os.read(self.source, READ_MAX_BYTES)
            except OSError:  # nothing waits, or the device is down
                return
            if self._held_bytes + len(packet) > HELD_MAX_BYTES:
                continue
            due_s = now_s + self.delay_s + self.jitter_s * random.uniform(-1, 1)
            self._held_bytes += len(packet)
            self.held.append((due_s, packet))

    def deliver(self, now_s: float) -> float:
        """Write the packets that are due, in order of arrival; return when the next is due, or infinity."""
        held = self.held
        while held and held[0][0] <= now_s + EARLY_S:
            packet = held.popleft()[1]
            self._held_bytes -= len(packet)
            try:
                os.write(self.target, packet)
            except OSError:  # the other end is down or full: the packet is lost, as on a cable
                continue
        return held[0][0] if held else float("inf")


def obey(orders: bytes, ways: list[Direction]) -> None:
    """Apply orders; lines are whole, because the lab writes less than a pipe holds at once."""
    for line in orders.splitlines():
        index, delay_s, jitter_s = json.loads(line)
        for way in ways[2 * index : 2 * index + 2]:
            way.delay_s, way.jitter_s = delay_s, jitter_s


def main(links: list[tuple[int, int, float, float]]) -> None:
    """Carry packets until standard input ends."""
    with contextlib.suppress(PermissionError):  # some containers forbid it
        os.nice(FIRST)
    ways = [way for a, b, *times in links for way in (Direction(a, b, *times), Direction(b, a, *times))]
    poll = select.epoll()
    by_source = {way.source: way for way in ways}
    for descriptor in (*by_source, sys.stdin.fileno()):
        poll.register(descriptor, select.EPOLLIN)
    busy: set[Direction] = set()
    next_s = float("inf")
    while True:
        wait_s = min(next_s - time.monotonic(), 1.0)
        events = poll.poll(max(wait_s, 0.0))
        now_s = time.monotonic()
        for descriptor, _ in events:
            if descriptor in by_source:
                by_source[descriptor].receive(now_s)
                busy.add(by_source[descriptor])
            elif orders := os.read(descriptor, READ_MAX_BYTES):
                obey(orders, ways)
            else:
                return
        due = {way: way.deliver(now_s) for way in busy}
        busy = {way for way in busy if way.held}
        next_s = min(due.values(), default=float("inf"))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
