"""`bench topology`: bytes of each member and round for 4 to 64 simulated members."""
