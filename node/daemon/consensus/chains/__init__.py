"""What the ledger tells of epochs, whose chain decides a run. It knows no ballots and no sets. Pure."""
