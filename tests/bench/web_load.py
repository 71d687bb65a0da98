"""What readers of a node's web page cost its daemon: `python -m tests.bench.web_load URL PID [SECONDS]`."""

import socket
import sys
import threading
import time
from urllib.parse import urlsplit

import psutil

READERS = (0, 1, 8, 64, 0)
GIVE_UP_S = 5.0


def read(url: str, ended: threading.Event, answers: list[int]) -> None:
    """Ask again and again, as fast as the node lets us."""
    parts = urlsplit(url)
    asked = f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode()
    while not ended.is_set():
        try:
            with socket.create_connection((parts.hostname, parts.port), GIVE_UP_S) as link:
                link.sendall(asked)
                size = sum(map(len, iter(lambda link=link: link.recv(1 << 20), b"")))
                answers.append(size)
        except OSError:
            continue


def measure(url: str, daemon: psutil.Process, readers: int, span_s: float) -> str:
    """One line: CPU of the daemon and answers a second."""
    ended, answers = threading.Event(), []
    threads = [threading.Thread(target=read, args=(url, ended, answers)) for _ in range(readers)]
    before, began = daemon.cpu_times(), time.monotonic()
    for thread in threads:
        thread.start()
    time.sleep(span_s)
    after, took_s, count = daemon.cpu_times(), time.monotonic() - began, len(answers)
    ended.set()
    for thread in threads:
        thread.join()
    share = (after.user + after.system - before.user - before.system) / took_s
    size_kB = sum(answers[:count]) / max(1, count) / 1e3
    return (
        f"{readers:3} readers: daemon {share:6.1%} of a core, {count / took_s:6.1f} answers/s of {size_kB:.0f} kB"
    )


def main(url: str, pid: str, span_s: str = "10") -> None:
    for readers in READERS:
        print(measure(url, psutil.Process(int(pid)), readers, float(span_s)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
