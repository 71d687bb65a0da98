"""Which weights contributions have: what follows from audits (docs/audits.md), and from probation."""
