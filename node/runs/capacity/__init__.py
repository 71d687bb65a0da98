"""What a run needs of a machine and what this machine has: memory, experts, the join preview."""
