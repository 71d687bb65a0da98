"""On PYTHONPATH of a node, this makes its worker send noise as long as its work, in legal payloads.

Everything else is the product's: the node audits, votes, and trains in vain. Python imports it at its start.
"""

import sys
from typing import Any


def _send_noise() -> None:
    import torch

    from atoll.node.worker.error_feedback import ErrorFeedback
    from atoll.protocols.ledger.coverage import cover_of

    encode = ErrorFeedback.encode

    def with_noise(self: Any, number: int, weights: Any) -> bytearray:
        spec, draw = self._spec, torch.Generator().manual_seed(number)
        for span in cover_of(spec, number):
            rows = slice(span.start, span.stop)
            work = weights.anchor_C4096[rows] - weights.rows(span)
            noise = torch.randn(work.shape, generator=draw) * (work != 0)
            # β · e + work is what is sent: noise, without any of the work.
            self.residual_C4096[rows] = (noise * (work.norm() / noise.norm()) - work) / spec.compress.feedback
        return encode(self, number, weights)

    ErrorFeedback.encode = with_noise  # type: ignore[method-assign]


if "atoll.node.worker.main" in sys.orig_argv:
    _send_noise()
