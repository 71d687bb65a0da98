"""The operating system, used safely: whole-file writes, key files, child processes and their end, notifiers."""
