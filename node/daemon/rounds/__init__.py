"""Pure state machine of a round: when this node trains, waits, folds and goes on."""
