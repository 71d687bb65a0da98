"""`atoll sim`: a swarm of real processes on this machine, judged at its end."""
