"""Commands that make a node pleasant to own: its settings, its service, its disk, its bug reports."""
