"""Everything that the members of one run share over a host, put together: ledger, registers, blobs, peers."""
