"""`bench cli`: how long light commands take to start."""
