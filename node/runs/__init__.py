"""Making and finding runs: presets, invites, fetching a run, its continuation."""
