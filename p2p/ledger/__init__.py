"""The replicated set of signed records of a run: every author's hash-linked feed, on disk and synchronised."""
