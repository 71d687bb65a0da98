"""The terminal's full-screen view of a running node."""
