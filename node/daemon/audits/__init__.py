"""Audits of contributions: who audits whom, and which weights follow from the verdicts (docs/audits.md)."""
