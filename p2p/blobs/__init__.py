"""Immutable bytes named by their BLAKE3 hash: stored, served, and fetched from several holders at once."""
