"""What the process that writes a sample text needs of the host's memory (node/generation/sample_child.py).

Pure. Peaks of that process were measured for `10m`, `50m` and `moe-12m`: 613, 934 and 705 MiB (docs/memory.md).
"""

from atoll.protocols.run.run_spec import RunSpec

BASE_BYTES = 560 << 20
"""Python with torch and transformers, and the buffers of a text."""
DENSE_BYTES = 9
"""Bytes of a parameter: its saved integer, its number in float32, and some of one more while a tensor is made."""
MIXTURE_BYTES = 17
"""The same where transformers joins the experts' matrices, of which it has a second copy then."""
MOMENTUM_BYTES = 4
"""More for each outer momentum, which is saved with the weights."""


def sample_bytes(spec: RunSpec) -> int:
    """Most bytes of memory at once."""
    whole = spec.model.base
    each = MIXTURE_BYTES if whole.experts else DENSE_BYTES
    return BASE_BYTES + (each + MOMENTUM_BYTES * spec.outer.momenta) * whole.parameters
