"""How two nodes compare ledgers by calls: entries, proofs, orphans, the floors of feeds, certified summaries."""
