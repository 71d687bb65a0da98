"""The arithmetic of reductions: the mean of one slice, compressed, and how others verify it."""
