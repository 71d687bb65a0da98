"""Carries small messages to all members of a run."""
