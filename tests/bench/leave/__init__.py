"""Members of a run leave for good: what it costs the others."""
