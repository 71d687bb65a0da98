"""Gets what a node needs of others: tokenizer, moments, shards of a text, its own feed. Hands on its state."""
