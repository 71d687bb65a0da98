"""What the user chooses on this machine: NodeConfig, the home folder, devices and ports."""
