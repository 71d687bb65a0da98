"""Rules of the outer step that keep momentum: a state and the mean of a round give the next state."""
