"""What a worker imports, and what it leaves out."""
