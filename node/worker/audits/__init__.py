"""The worker's part in audits: what a contribution shows of the windows that its author was to train on."""
