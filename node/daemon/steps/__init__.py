"""How many steps of a round a member takes, so that all are done at about the same time."""
