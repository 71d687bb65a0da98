"""Fixtures that several rooms of `node` share."""

from tests.node.reduction_world import small, world_of

__all__ = ["small", "world_of"]
