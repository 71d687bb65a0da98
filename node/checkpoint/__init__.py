"""Tensors on disk: generations of local state, snapshots, universal checkpoints."""
