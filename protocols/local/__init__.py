"""Messages between the processes of one machine: daemon, worker, local ranks and CLI. Never a peer wire."""
