"""Rounds with many members: each member reduces one slice of the arena and audits others."""
