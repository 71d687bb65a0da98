"""The checks of `atoll doctor`: machine, network and the running node."""
