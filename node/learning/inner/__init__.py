"""The inner optimiser: AdamW steps between two outer steps, and validation."""
