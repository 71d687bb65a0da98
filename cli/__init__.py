"""The command line: commands over the control socket, simulations, and what they print."""
