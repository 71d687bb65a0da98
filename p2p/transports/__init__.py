"""Implementations of the host interface, one folder each, and what they share."""
