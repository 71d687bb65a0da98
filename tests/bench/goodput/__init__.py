"""What is trained while members are killed and come back, against an undisturbed swarm."""
