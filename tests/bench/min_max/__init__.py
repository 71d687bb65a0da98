"""Compressed extra-gradient for min-max problems: what outer loops of minimisation cannot do."""
