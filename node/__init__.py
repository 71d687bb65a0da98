"""What a node does: the daemon process, the worker process, and the training itself."""
