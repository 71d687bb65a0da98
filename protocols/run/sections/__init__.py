"""Sections of a RunSpec that only some runs have: audits, merging of experts, serving, zeroth-order steps; and
compression."""
