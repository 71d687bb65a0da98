"""`bench idle`: the CPU of daemons that have nothing to do."""
