"""What of a daemon belongs to one chain of its run: its driver. The worker goes on through changes."""
