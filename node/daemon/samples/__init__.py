"""Sample texts of the running run's model: a process of lowest priority that neither delays nor fails the node."""
