"""What a swarm is measured against: data-parallel AdamW and dense averaging in one process."""
