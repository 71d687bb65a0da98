"""The operating system, used safely: whole-file writes, key files, child processes, notifiers."""
