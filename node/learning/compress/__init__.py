"""Codecs: pseudo-gradients to payload bytes and back, compiled for the CPU."""
