"""What all parts of a daemon run on: interfaces to swarm and worker, event queue, machines, guard of faults."""
