"""A node as a service: readiness and signs of life for the service manager, and the files that it wants."""
