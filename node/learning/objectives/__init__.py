"""Terms of the loss beside the cross-entropy: their interface, those built in, and how others are found."""
