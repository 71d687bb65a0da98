"""The pipe between daemon and worker: frames, and the process that is kept alive at its other end."""
