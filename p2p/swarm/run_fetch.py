"""Fetches the signed RunSpec from any node of the run, before membership: an invite names it only by its hash.

On one stream of the wire `run`, the requester sends the run id (32 bytes) as a frame. The answer is one frame with
the `.run` file, empty if the node does not have it. The answer is not trusted: its hash must be the run id.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.p2p.discovery.dns import TxtLookup, system_lookup
from atoll.p2p.discovery.dnsaddr import resolve
from atoll.p2p.host.framing import read_frame, write_frame
from atoll.p2p.host.interface import Host, PeerAddress, Stream
from atoll.p2p.membership.address_book import is_dns_seed
from atoll.protocols.codec import MESSAGE_MAX_BYTES, decode
from atoll.protocols.errors import ConfigError, DecodeError, PeerFault, Unreachable
from atoll.protocols.ids import DIGEST_BYTES, RunId, digest, short
from atoll.protocols.run.run_spec import SPEC_VERSION, SignedRun, open_run, version_of
from atoll.protocols.wires import RUN

PROTOCOL = RUN.protocol()
SEED_S = 15.0
"""Deadline for one seed, in seconds: name, dial, request and answer."""
_ANSWER_S = 10.0


def serve_run(host: Host, run_file: bytes) -> None:
    """Answer requests for the run id of `run_file`. Raises DecodeError or SignatureFault."""
    run = open_run(run_file).id

    async def answer(stream: Stream) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                asked = await read_frame(stream, DIGEST_BYTES)
                if len(asked) != DIGEST_BYTES:
                    raise DecodeError("a run id has 32 bytes")
                await write_frame(stream, run_file if asked == run else b"")
                await _end_of(stream)
        except TimeoutError:
            stream.reset()

    host.set_handler(PROTOCOL, answer)


async def fetch_run(
    host: Host, seeds: Sequence[PeerAddress], run: RunId, *, lookup: TxtLookup = system_lookup
) -> bytes:
    """The `.run` file of `run`, from the first seed that has it; all seeds are asked at once, each for SEED_S.

    Raises Unreachable with the reason of each seed, ConfigError if the run is of another version.
    """
    async with asyncio.TaskGroup() as group:
        asking = _Asking(group, host, run, lookup)
        asking.add(_by_peer(seeds))
    if asking.found:
        return asking.found[0]
    if asking.refused is not None:
        raise asking.refused
    text = "; ".join(f"{seed}: {reason}" for seed, reason in asking.reasons.items())
    raise Unreachable(f"no seed gave the run: {text or 'the invite names no seed'}")


@dataclass
class _Asking:
    """Requests in progress. The first good answer cancels the others."""

    group: asyncio.TaskGroup
    host: Host
    run: RunId
    lookup: TxtLookup
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    found: list[bytes] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    refused: ConfigError | None = None
    """Why this program cannot take part in the run, whoever gives it."""

    def add(self, seeds: Sequence[PeerAddress]) -> None:
        """Start requests to these seeds, too."""
        self.tasks += [self.group.create_task(self._ask(seed)) for seed in seeds]

    async def _ask(self, seed: PeerAddress) -> None:
        try:
            async with asyncio.timeout(SEED_S):
                if is_dns_seed(seed):
                    self.add((await resolve(seed, self.lookup)).addresses)
                    return
                self.found.append(await _from_peer(self.host, seed, self.run))
        except TimeoutError:
            self.reasons[_name(seed)] = f"no answer in {SEED_S:.0f} s"
        except (Unreachable, PeerFault) as error:
            self.reasons[_name(seed)] = error.line()
        except ConfigError as error:
            self.refused = error
            self._end()
        else:
            self._end()

    def _end(self) -> None:
        for task in self.tasks:
            task.cancel()


async def _from_peer(host: Host, address: PeerAddress, run: RunId) -> bytes:
    await host.connect(address)
    stream = await host.open_stream(address.peer, PROTOCOL)
    try:
        await write_frame(stream, run)
        data = await read_frame(stream, MESSAGE_MAX_BYTES)
        await stream.close()
    except BaseException:
        stream.reset()
        raise
    if not data:
        raise Unreachable(f"{short(address.peer)} does not train this run")
    _check_version(data, run)
    if open_run(data).id != run:
        raise DecodeError(f"{short(address.peer)} gave another run")
    return data


def _check_version(data: bytes, run: RunId) -> None:
    """Raise ConfigError if these are the bytes of the run, and of another version. Raises DecodeError."""
    # The id is the hash of the bytes, so no peer can make this up: other seeds have the same.
    spec = decode(data, SignedRun).spec
    if RunId(digest(spec)) != run or (version := version_of(spec)) == SPEC_VERSION:
        return
    older = "join with the version that its members have, or ask its owner to continue it with this one"
    hint = "update atoll on this node" if version > SPEC_VERSION else older
    raise ConfigError(f"this run has RunSpec version {version}; this node speaks {SPEC_VERSION}", hint=hint)


def _by_peer(seeds: Sequence[PeerAddress]) -> list[PeerAddress]:
    """Group addresses by peer, so that each peer gets one request; DNS names stay separate."""
    grouped: dict[str, PeerAddress] = {}
    for seed in seeds:
        key = _name(seed) if is_dns_seed(seed) else str(seed.peer)
        known = grouped.get(key, PeerAddress(seed.peer, ()))
        grouped[key] = PeerAddress(seed.peer, tuple(dict.fromkeys((*known.maddrs, *seed.maddrs))))
    return list(grouped.values())


def _name(seed: PeerAddress) -> str:
    return f"{seed.maddrs[0]}/p2p/{seed.peer}" if seed.peer else seed.maddrs[0]


async def _end_of(stream: Stream) -> None:
    # The initiator closes first (rules of p2p/host/interface.py): closing before it has read would cut our tail.
    try:
        await stream.read_exactly(1)
    except Unreachable:
        await stream.close()
    else:
        raise DecodeError("bytes after the question")
