"""Text from trained weights: of a run in this home, or of a Hugging Face folder."""
