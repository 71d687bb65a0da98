"""Fetches the tokenizer of a run. The worker cannot begin without it."""

from collections.abc import Callable

from atoll.node.daemon.assets.fetching import fetch_file
from atoll.node.daemon.core.interfaces import BlobShelf
from atoll.protocols.ids import Digest
from atoll.protocols.run.run_spec import TOKENIZER_MAX_BYTES, RunSpec


async def fetch_tokenizer(spec: RunSpec, net: BlobShelf, report: Callable[[str], None]) -> None:
    """Return when the tokenizer is complete on disk; at once for a run without one. See `fetch_file`."""
    blob = Digest(spec.data.tokenizer_blob)
    if blob:
        what = "the tokenizer"
        await fetch_file(blob, TOKENIZER_MAX_BYTES, owner=spec.owner, net=net, report=report, what=what)
