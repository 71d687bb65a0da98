"""Flooding of small messages to all members of a run."""
