"""`bench experts`: what members save that share the experts of a mixture."""
