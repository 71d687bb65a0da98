"""Weights in and out: Hugging Face folders, universal checkpoints, restoring a node."""
