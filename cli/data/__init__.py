"""Commands that pack texts into shards, and show what was packed."""
