"""The ledger of a run: every author's signed, hash-linked feed, stored on disk and synchronised with peers."""
