"""What peers say to each other: messages, records, identifiers and pure rules. No I/O, no clock, no torch."""
