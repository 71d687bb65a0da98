"""Fine-tuning by one byte a step: what it learns, and what it costs."""
