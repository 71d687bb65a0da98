"""Fetches the frozen base of a LoRA run. The worker cannot begin without it."""

from collections.abc import Callable

from atoll.node.daemon.assets.fetching import fetch_file
from atoll.node.daemon.core.interfaces import BlobShelf
from atoll.protocols.ids import Digest
from atoll.protocols.run.bounds import base_max_bytes
from atoll.protocols.run.run_spec import RunSpec


async def fetch_base(spec: RunSpec, net: BlobShelf, report: Callable[[str], None]) -> None:
    """Return when the base of a LoRA run is complete on disk. See `fetch_file`."""
    blob, most = Digest(spec.base or b""), base_max_bytes(spec)
    await fetch_file(blob, most, owner=spec.owner, net=net, report=report, what="the base")
