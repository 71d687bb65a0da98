"""Pure state machine of finality: on which exact set of contributions the voters agree."""
