"""Sections that a run has only where its owner tries a published method."""
