"""The rule that a run names: `compress.feedback_rule` of its RunSpec."""

import torch

from atoll.node.learning.compress.feedback.dgc import DeepGradientCompression
from atoll.node.learning.compress.feedback.econtrol import EControl
from atoll.node.learning.compress.feedback.memory import FeedbackRule, Memory
from atoll.protocols.run.arena import arena_of
from atoll.protocols.run.run_spec import RunSpec


def feedback_rule_of(spec: RunSpec, device: torch.device) -> FeedbackRule | None:
    """The rule of a run, with an empty memory on the encoder's device; None for `ef`."""
    compress, outer = spec.compress, spec.outer
    chunks = arena_of(spec.model).chunks
    memory = Memory(chunks, device) if compress.memories(outer.momenta) else None
    if compress.feedback_rule == "econtrol":
        beta = outer.beta_256 / 256 if outer.momenta else 0.0
        return EControl(compress.eta, beta, outer.fragments, memory)
    if compress.feedback_rule == "dgc" and memory is not None:
        return DeepGradientCompression(spec, memory)
    return None
