"""Sections of a RunSpec that only some runs have: audits, summaries, merging, serving, zeroth-order steps; and
compression."""
