"""What an encoder writes, for tests of its readers."""

import torch

from atoll.node.learning.compress.codecs import codec_of

CHUNKS = 2


def honest(name: str, k: int, seed: int) -> bytes:
    """What an encoder writes, of values with many ties, zeros and silent chunks."""
    made = torch.Generator().manual_seed(seed)
    kinds = (
        torch.randn((CHUNKS, 4096), generator=made),
        torch.randint(-2, 3, (CHUNKS, 4096), generator=made).float(),
        torch.zeros((CHUNKS, 4096)).index_fill_(1, torch.tensor([0, 4095]), 1.0),
        torch.full((CHUNKS, 4096), 2.0**63),
    )
    values = kinds[seed % 4] * 2.0 ** (-(seed % 27))
    values[0] *= seed % 3 != 0
    nothing = torch.zeros_like(values)
    return bytes(codec_of(name, k).encode(values, nothing, nothing, 1.0))
