"""The text of a run: sources, tokenizers, and who reads which windows."""
