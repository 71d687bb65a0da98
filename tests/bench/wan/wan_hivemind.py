"""Child of `bench wan`: one peer that averages random float32 values with hivemind's `DecentralizedAverager`.

Arguments: its address, the number of values, the size of the group, `float16` or `none`, a bootstrap.
hivemind forks a process for its DHT and one for its averager; they live in the host's network namespace, and the
lab ends what is left there.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase, Float16Compression, NoCompression
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from atoll.protocols.errors import LocalFault, Unreachable
from atoll_bench.child import obey

MATCHING_S = 5.0
"""hivemind's default: a leader waits so long for others, or until its group is full."""
POLL_S = 0.005
DIALS, DIAL_PAUSE_S = 30, 1.0
COMPRESSIONS: dict[str, type[CompressionBase]] = {"float16": Float16Compression, "none": NoCompression}


class Peer:
    """One averager on its own DHT node."""

    def __init__(self, ip: str, values: int, group: int, compression: str, bootstrap: str | None) -> None:
        """Starts hivemind's DHT process, then its averager's."""
        torch.set_num_threads(1)
        self._dht = DHT(
            [bootstrap] if bootstrap else [],
            host_maddrs=[f"/ip4/{ip}/tcp/0"], nat_port_map=False, auto_nat=False, start=True,
        )  # fmt: skip
        self._averager = DecentralizedAverager(
            [torch.randn(values)], self._dht, prefix="wan", start=True, target_group_size=group,
            min_group_size=group, min_matchmaking_time=MATCHING_S, request_timeout=MATCHING_S * 0.6,
            next_chunk_timeout=MATCHING_S, compression=COMPRESSIONS[compression](), allow_state_sharing=False,
        )  # fmt: skip
        self._group = group
        self._step: StepControl | None = None

    async def address(self) -> str:
        """Where others bootstrap."""
        return str(self._dht.get_visible_maddrs()[0])

    async def meet(self, addresses: Sequence[str]) -> None:
        """Dial others before the first step. Raises Unreachable.

        Two averagers that dial each other for the first time in the middle of an all-reduce may both fail ("dial
        backoff").
        """
        p2p = await self._dht.replicate_p2p()
        for address in addresses:
            maddr, _, peer = address.rpartition("/p2p/")
            await self._dial(p2p, PeerID.from_base58(peer), Multiaddr(maddr))

    async def _dial(self, p2p: P2P, peer: PeerID, maddr: Multiaddr) -> None:
        for _ in range(DIALS):
            with contextlib.suppress(P2PDaemonError):
                return await p2p._client.connect(peer, [maddr])  # type: ignore[no-any-return]
            await asyncio.sleep(DIAL_PAUSE_S)
        raise Unreachable(f"hivemind cannot dial {maddr}")

    async def step(self, limit_s: float) -> float:
        """Seconds of a whole `step()`: finding the group, and the exchange. Raises Unreachable."""
        began = time.monotonic()
        self._check(await asyncio.to_thread(self._averager.step, timeout=limit_s))
        return time.monotonic() - began

    async def match(self, limit_s: float) -> float:
        """Find a group and stop there; seconds. Raises Unreachable."""
        began = time.monotonic()
        step = await asyncio.to_thread(self._averager.step, timeout=limit_s, wait=False, require_trigger=True)
        while step.stage != AveragingStage.AWAITING_TRIGGER:
            if step.done() or time.monotonic() - began > limit_s:
                raise Unreachable("hivemind found no group")
            await asyncio.sleep(POLL_S)
        self._step = step
        return time.monotonic() - began

    async def exchange(self, limit_s: float) -> float:
        """What follows a match: the all-reduce alone; seconds. Raises LocalFault, Unreachable."""
        if self._step is None:
            raise LocalFault("no group was found before")
        began = time.monotonic()
        self._step.allow_allreduce()
        self._check(await asyncio.to_thread(self._step.result, limit_s))
        return time.monotonic() - began

    async def values(self) -> list[float]:
        """The first few values, to see that all peers have the same."""
        with self._averager.get_tensors() as tensors:
            first: list[float] = tensors[0][:8].tolist()
        return first

    def _check(self, gathered: Any) -> None:
        if not gathered or len(gathered) != self._group:
            raise Unreachable(f"hivemind averaged {len(gathered or ())} of {self._group} peers")


def main(ip: str, values: str, group: str, compression: str, bootstrap: str | None = None) -> None:
    """Until standard input ends."""
    peer = Peer(ip, int(values), int(group), compression, bootstrap)
    names = ("address", "meet", "step", "match", "exchange", "values")
    orders = {name: getattr(peer, name) for name in names}
    asyncio.run(obey(orders))


if __name__ == "__main__":
    main(*sys.argv[1:])
