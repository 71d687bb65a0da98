"""Puts together what the members of a run share over one host: ledger, registers, blobs, connections."""
